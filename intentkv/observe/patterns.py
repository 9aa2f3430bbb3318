"""From the texts a template writes to the token ids that stand for them whatever the contents are.

Tokenizers merge across the border between template and content (a newline of the header and one of the content become
one token), so each text is encoded between several contents, and only the tokens common to all of them count.
"""

import itertools
from collections.abc import Callable, Iterable, Sequence

from intentkv.observe.probes import TAG, Gap

Encode = Callable[[str], list[int]]
Tokens = tuple[int, ...]

_LEFTS = ("zebra", "zebra.", "7", "zebra\n", "}")  # how a content may end
_RIGHTS = ("zebra", " zebra", "\nzebra", "7", "{", '"', "<")  # how a content may begin


def special_ids(texts: Iterable[str], encode: Encode) -> frozenset[int]:
    """Ids of the special tokens in template texts: tags such as `<|im_start|>` or `[INST]` that are one token."""
    tags = {tag for text in texts for tag in TAG.findall(text)}
    return frozenset(ids[0] for tag in tags if len(ids := encode(tag)) == 1)


def headers(gaps: Sequence[Gap], encode: Encode) -> set[Tokens]:
    """The tokens with which the message begins in all of `gaps`; more than one if what is before matters."""
    found: set[Tokens] = set()
    for left in _LEFTS if gaps[0].previous else ("",):
        parts = [
            _split(left, ending, footer, encode)
            for gap in gaps
            for text, footer in zip(gap.texts, gap.footers, strict=True)
            for ending in _endings(text)
        ]
        content = tuple(encode(left))
        # A header right behind a word may merge with it (`zebraUSER`); what holds content is no header.
        if all(footer for gap in gaps for footer in gap.footers) or all(before == content for before, _ in parts):
            found.add(_common_prefix(header for _, header in parts))
    return found - {()}


def footers(gap: Gap, encode: Encode) -> set[Tokens]:
    """The tokens with which the message before a gap ends, where the next has no header of its own."""
    ends = (
        _common_prefix(_split(left, ending, 0, encode)[1] for ending in _endings(text))
        for left in _LEFTS
        for text in gap.texts
    )
    return {_common_suffix(list(ends))} - {()}


def _endings(text: str) -> list[str]:
    """`text` with contents behind it. Bare as well, without the white space that merges with more of its kind."""
    return [*(text + right for right in _RIGHTS), text.rstrip()]


def _split(left: str, text: str, cut: int, encode: Encode) -> tuple[Tokens, Tokens]:
    """Tokens of `left + text` before and from the token that holds character `cut` of `text`."""
    whole = tuple(encode(left + text))
    before = _common_prefix([whole, tuple(encode(left + text[:cut]))])
    return before, whole[len(before) :]


def _common_prefix(rows: Iterable[Tokens]) -> Tokens:
    columns = itertools.takewhile(lambda column: len(set(column)) == 1, zip(*rows, strict=False))
    return tuple(column[0] for column in columns)


def _common_suffix(rows: Iterable[Tokens]) -> Tokens:
    return _common_prefix(row[::-1] for row in rows)[::-1]
