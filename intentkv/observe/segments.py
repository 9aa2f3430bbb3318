"""Segments: the sentences, lines and JSON records of a context, found from its tokens alone.

Half a fact is worth nothing, so what stays and what goes is better decided by the segment than by the token. The tokenizer is
asked once, for a few flags of every token; after that a context costs a handful of array operations.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

LONGEST = 64  # tokens; text without any punctuation (base64, minified code) is cut there

_STOPS = (".", "!", "?", ";", "。", "！", "？", "；")
_CLOSERS = "\"'`)]}”’»"  # a stop may stand before them
_RECORD_ENDS = ("},", "],")
_RECORD_STARTS = ("{", "[")


@dataclass(frozen=True)
class TokenMarks:
    """What the text of each token says about segments; one entry a token of the vocabulary.

    Attributes:
        breaks: `[V]` bool, a segment ends with this token whatever follows: it ends a line, or is a special token.
        stops: `[V]` bool, a segment ends with this token if a space follows: it ends in `.`, `!`, `?` or `;`.
        records: `[V]` bool, a segment ends with this token if a new record follows: it ends in `},` or `],`.
        spaced: `[V]` bool, begins with white space, or is a special token.
        opens: `[V]` bool, begins with an opening brace or bracket, white space aside.
    """

    breaks: NDArray[np.bool_]
    stops: NDArray[np.bool_]
    records: NDArray[np.bool_]
    spaced: NDArray[np.bool_]
    opens: NDArray[np.bool_]

    @classmethod
    def from_texts(cls, texts: Iterable[str], special: Iterable[int] = ()) -> "TokenMarks":
        """Marks from the text of every token, in order of their ids, and the ids of the special ones."""
        table = np.array([_marks(text) for text in texts], dtype=np.bool_).reshape(-1, 5)
        table[list(special)] = (True, False, False, True, False)
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
    known = np.where((ids >= 0) & (ids < len(marks.breaks)), ids, -1)

    def has(flag: NDArray[np.bool_]) -> NDArray[np.bool_]:
        marked: NDArray[np.bool_] = flag[known] & (known >= 0)
        return marked

    follows = np.zeros(len(ids), np.bool_)
    follows[:-1] = (has(marks.stops)[:-1] & has(marks.spaced)[1:]) | (has(marks.records)[:-1] & has(marks.opens)[1:])
    ends = has(marks.breaks) | follows
    starts = np.concatenate(([0], np.flatnonzero(ends[:-1]) + 1))
    begins = np.zeros(len(ids), np.bool_)
    begins[starts] = True
    offsets = np.arange(len(ids)) - np.repeat(starts, np.diff(np.append(starts, len(ids))))
    begins |= offsets % LONGEST == 0
    return np.cumsum(begins) - 1


def _marks(text: str) -> tuple[bool, bool, bool, bool, bool]:
    bare = text.rstrip().rstrip(_CLOSERS)
    return (
        "\n" in text,
        bare.endswith(_STOPS),
        text.rstrip().endswith(_RECORD_ENDS),
        text[:1].isspace(),
        text.lstrip().startswith(_RECORD_STARTS),
    )
