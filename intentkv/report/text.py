"""Token ids as text that is safe to look at: what would be invisible, or would reorder its surroundings, is spelt out."""

from __future__ import annotations

import unicodedata
from collections.abc import Sequence
from typing import Final, Protocol

from intentkv.report.read import ReportError

LONGEST_CHARACTER: Final = 6  # tokens of which one character may be made up
_JOINERS: Final = "\u200c\u200d"  # part of the spelling of scripts and emoji


def visible(text: str) -> str:
    """`text` with control, format, surrogate and private characters shown by name; line feeds and tabs stay."""
    return "".join(map(_shown, text))


def _shown(char: str) -> str:
    code = ord(char)
    if char in "\n\t" or char in _JOINERS:
        return char
    if code < 0x20:
        return chr(0x2400 + code)
    if unicodedata.category(char) in ("Cc", "Cf", "Cs", "Co", "Cn", "Zl", "Zp"):
        return f"\u27e8U+{code:04X}\u27e9"
    return char


class Decoder(Protocol):
    """Attributes: special: ids that are structure rather than text. named: whether pieces are text rather than ids."""

    special: frozenset[int]
    named: bool

    def pieces(self, ids: Sequence[int]) -> list[str]:
        """One piece of visible text for each id; "" where a later one carries the text."""


class Numbers:
    """The ids themselves, for a report without a tokenizer."""

    special: frozenset[int] = frozenset()
    named = False

    def pieces(self, ids: Sequence[int]) -> list[str]:
        return [f"{token} " for token in ids]


class TokenizerText:
    """Text by the tokenizer of a model."""

    named = True

    def __init__(self, model: str) -> None:
        """`model`: a folder, or the name of a model that is on this machine.

        Nothing is downloaded, and no code that comes with the model is run. Raises ReportError.
        """
        from transformers import AutoTokenizer

        try:
            self._tokenizer = AutoTokenizer.from_pretrained(model, local_files_only=True, trust_remote_code=False)
        except (OSError, ValueError, KeyError) as error:
            raise ReportError(f"--tokenizer: cannot load {model!r}, which must be on this machine: {error}") from error
        self.special = frozenset(self._tokenizer.all_special_ids)
        self._size = len(self._tokenizer)
        self._known: dict[tuple[int, ...], str] = {}

    def pieces(self, ids: Sequence[int]) -> list[str]:
        pieces: list[str] = []
        before: tuple[int, ...] = ()  # a token of context: some tokenizers leave out the first space
        group: tuple[int, ...] = ()
        for token in ids:
            if token >= self._size:
                pieces.append(f"\u27e8{token}\u27e9")
                before = group = ()
                continue
            group += (token,)
            context, text = self._text(before), self._text(before + group)
            text = text[len(context) :] if text.startswith(context) else self._text(group)
            if text.endswith("\ufffd") and len(group) < LONGEST_CHARACTER:
                pieces.append("")  # part of a character: the token that ends it carries the text
                continue
            pieces.append(visible(text))
            before, group = group[-1:], ()
        if group:  # the text ends in the middle of a character
            pieces[-1] = "\ufffd"
        return pieces

    def _text(self, ids: tuple[int, ...]) -> str:
        if ids not in self._known:
            self._known[ids] = str(self._tokenizer.decode(list(ids), clean_up_tokenization_spaces=False))
        return self._known[ids]
