"""Segments: the sentences, lines and JSON records of a context, and their words, found from its tokens alone.

Half a fact is worth nothing, so what stays and what goes is better decided by the segment than by the token. The tokenizer is
asked once, for a few flags of every token; after that a context costs a handful of array operations.
"""

import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

LONGEST = 64  # tokens; text without any punctuation (base64, minified code) is cut there

_STOPS = (".", "!", "?", ";", "。", "！", "？", "；")
_CLOSERS = "\"'`)]}”’»"  # a stop may stand before them
_RECORD_ENDS = ("},", "],")
_RECORD_STARTS = ("{", "[")
_BETWEEN_WORDS = tuple(",;:'\"()[]{}<>|=")  # of JSON, CSV and calls that are written without spaces
_UNSPACED = re.compile("[\u0e00-\u0eff\u1000-\u109f\u1780-\u17ff\u2e80-\u9fff]")  # Thai to Chinese: a token is a word


@dataclass(frozen=True)
class TokenMarks:
    """What the text of each token says about segments; one entry a token of the vocabulary.

    Attributes:
        breaks: `[V]` bool, a segment ends with this token whatever follows: it ends a line, or is a special token.
        stops: `[V]` bool, a segment ends with this token if a space follows: it ends in `.`, `!`, `?` or `;`.
        records: `[V]` bool, a segment ends with this token if a new record follows: it ends in `},` or `],`.
        spaced: `[V]` bool, begins with white space, or is a special token.
        opens: `[V]` bool, begins with an opening brace or bracket, white space aside.
        words: `[V]` bool, a word begins with this token: it begins with white space, with punctuation that stands between
            words, or with a letter of a script without spaces, or is a special token.
    """

    breaks: NDArray[np.bool_]
    stops: NDArray[np.bool_]
    records: NDArray[np.bool_]
    spaced: NDArray[np.bool_]
    opens: NDArray[np.bool_]
    words: NDArray[np.bool_]

    @classmethod
    def from_texts(cls, texts: Iterable[str], special: Iterable[int] = ()) -> "TokenMarks":
        """Marks from the text of every token, in order of their ids, and the ids of the special ones."""
        table = np.array([_marks(text) for text in texts], dtype=np.bool_).reshape(-1, 6)
        table[list(special)] = (True, False, False, True, False, True)
        return cls(*np.ascontiguousarray(table.T))

    @classmethod
    def from_decoder(cls, decode: Callable[[int], str], size: int, special: Iterable[int] = ()) -> "TokenMarks":
        """Marks of a vocabulary of `size` tokens, `decode` giving the text of one; special tokens are not decoded."""
        known = set(special)
        return cls.from_texts(("" if i in known else decode(i) for i in range(size)), known)


def segment_numbers(ids: NDArray[np.int64], marks: TokenMarks) -> NDArray[np.int64]:
    """The number of each token's segment, `[n]` int64, from 0 and ascending; none is longer than `LONGEST` tokens.

    A segment ends behind a line break or a special token, behind a stop that white space follows (so that 3.14 and
    file.py stay whole), and between the records of a JSON array. A record's own fields stay together: a value without the name
    of its record says nothing.

    Args:
        ids: `[n]` tokens of a context, in order. Ids outside the vocabulary count as plain text.
        marks: of the same tokenizer.
    """
    if not len(ids):
        return np.empty(0, np.int64)
    ends = _flagged(ids, marks.breaks)
    ends[:-1] |= _flagged(ids, marks.stops)[:-1] & _flagged(ids, marks.spaced)[1:]
    ends[:-1] |= _flagged(ids, marks.records)[:-1] & _flagged(ids, marks.opens)[1:]
    starts = np.concatenate(([0], np.flatnonzero(ends[:-1]) + 1))
    begins = np.zeros(len(ids), np.bool_)
    begins[starts] = True
    offsets = np.arange(len(ids)) - np.repeat(starts, np.diff(np.append(starts, len(ids))))
    begins |= offsets % LONGEST == 0
    return np.cumsum(begins) - 1


def word_numbers(ids: NDArray[np.int64], numbers: NDArray[np.int64], marks: TokenMarks) -> NDArray[np.int64]:
    """The number of each token's word, `[n]` int64, from 0 and ascending. A number, a path or a hash is one word, however many
    tokens it takes; a word ends with its segment.

    Args:
        ids: `[n]` tokens of a context. Each id outside the vocabulary is a word.
        numbers: `[n]` of the same, from `segment_numbers`. marks: of the same tokenizer.
    """
    begins = _flagged(ids, marks.words) | (ids < 0) | (ids >= len(marks.words))
    begins[1:] |= np.diff(numbers) > 0
    words: NDArray[np.int64] = np.cumsum(begins)
    return words - words[:1]


def _flagged(ids: NDArray[np.int64], flags: NDArray[np.bool_]) -> NDArray[np.bool_]:
    """The flag of each token, `[n]` bool; False for ids outside the vocabulary."""
    known = (ids >= 0) & (ids < len(flags))
    flagged: NDArray[np.bool_] = flags[np.where(known, ids, 0)] & known
    return flagged


def _marks(text: str) -> tuple[bool, bool, bool, bool, bool, bool]:
    bare = text.rstrip().rstrip(_CLOSERS)
    return (
        "\n" in text,
        bare.endswith(_STOPS),
        text.rstrip().endswith(_RECORD_ENDS),
        text[:1].isspace(),
        text.lstrip().startswith(_RECORD_STARTS),
        text[:1].isspace() or text.startswith(_BETWEEN_WORDS) or _UNSPACED.match(text) is not None,
    )
