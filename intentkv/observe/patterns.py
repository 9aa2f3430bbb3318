"""From the texts a template writes to the token ids that stand for them whatever the contents are.

Tokenizers merge across the border between template and content (a newline of the header and one of the content become
one token), so each text is encoded between several contents, and only the tokens common to all of them count.
"""

import itertools
import re
from collections.abc import Callable, Iterable, Sequence

from intentkv.observe.probes import Gap

Encode = Callable[[str], list[int]]
Tokens = tuple[int, ...]

_LEFTS = ("zebra", "zebra.", "7", "zebra\n", "}")  # how a content may end
_RIGHTS = ("zebra", " zebra", "\nzebra", "7", "{", '"', "<")  # how a content may begin
_TAG = re.compile(r"<[^<>\s]+>|\[[^\[\]\s]+\]")


def special_ids(texts: Iterable[str], encode: Encode) -> frozenset[int]:
    """Ids of the special tokens in template texts: tags such as `<|im_start|>` or `[INST]` that are one token."""
    tags = {tag for text in texts for tag in _TAG.findall(text)}
    return frozenset(ids[0] for tag in tags if len(ids := encode(tag)) == 1)


def opening(texts: Iterable[str], encode: Encode) -> Tokens:
    """The tokens at the very start of every prompt that begins with one of `texts`."""
    return _common_prefix(tuple(encode(text + right)) for text in texts for right in _RIGHTS)


def headers(gaps: Sequence[Gap], encode: Encode) -> set[Tokens]:
    """The tokens with which the second message begins in all of `gaps`; more than one if what is before matters."""
    found = {
        _common_prefix(
            _split(left, text, footer, right, encode)[1]
            for gap in gaps
            for text, footer in zip(gap.texts, gap.footers, strict=True)
            for right in _RIGHTS
        )
        for left in _LEFTS
    }
    return found - {()}


def footers(gap: Gap, encode: Encode) -> set[Tokens]:
    """The tokens with which the first message of a gap ends, where the second has no header of its own."""
    ends = []
    for left, (text, footer) in itertools.product(_LEFTS, zip(gap.texts, gap.footers, strict=True)):
        shown = text[:footer].rstrip()  # white space may merge with the next content
        content, _ = _split(left, shown, 0, "", encode)
        stable = _common_prefix(tuple(encode(left + text + right)) for right in _RIGHTS)
        closed, _ = _split(left, text, len(shown), _RIGHTS[0], encode)
        ends.append(stable[len(content) : len(closed)])
    return {_common_suffix(ends)} - {()}


def _split(left: str, text: str, cut: int, right: str, encode: Encode) -> tuple[Tokens, Tokens]:
    """Tokens of `left + text + right` before and from the token that holds character `cut` of `text`."""
    whole = tuple(encode(left + text + right))
    before = _common_prefix([whole, tuple(encode(left + text[:cut]))])
    return before, whole[len(before) :]


def _common_prefix(rows: Iterable[Tokens]) -> Tokens:
    columns = itertools.takewhile(lambda column: len(set(column)) == 1, zip(*rows, strict=False))
    return tuple(column[0] for column in columns)


def _common_suffix(rows: Iterable[Tokens]) -> Tokens:
    return _common_prefix(row[::-1] for row in rows)[::-1]
