"""Sentences, lines and records, found from tokens."""

from __future__ import annotations

import re

import numpy as np
import pytest

from intentkv.observe.segments import LONGEST, TokenMarks, segment_numbers

PIECES = r"<\|[a-z_]+\|>|\},|\],| ?[A-Za-z]+|[0-9]+| ?[\{\[]|\n|[^\w\s]| "


def split(text: str) -> list[str]:
    """The segments of `text`, cut into word-like tokens."""
    tokens = re.findall(PIECES, text)
    assert "".join(tokens) == text
    vocabulary = sorted(set(tokens))
    special = [i for i, token in enumerate(vocabulary) if token.startswith("<|")]
    marks = TokenMarks.from_texts(vocabulary, special)
    numbers = segment_numbers(np.array([vocabulary.index(t) for t in tokens]), marks)
    assert numbers[0] == 0 and set(np.diff(numbers)) <= {0, 1}
    pieces = [""] * (numbers[-1] + 1)
    for token, number in zip(tokens, numbers, strict=True):
        pieces[number] += token
    return pieces


@pytest.mark.parametrize(
    ("text", "segments"),
    [
        ("It rains. It pours! Why? Go", ["It rains.", " It pours!", " Why?", " Go"]),
        ("pi is 3.14, see main.py. Done.", ["pi is 3.14, see main.py.", " Done."]),
        ("first line\nsecond line\n", ["first line\n", "second line\n"]),
        ("<|im_start|>user\nHi.<|im_end|>\n", ["<|im_start|>", "user\n", "Hi.", "<|im_end|>", "\n"]),
        ('[{"a": 1, "b": 2}, {"a": 3}]', ['[{"a": 1, "b": 2},', ' {"a": 3}]']),
        ("no stop at all", ["no stop at all"]),
        ("He said so. <|im_end|>", ["He said so.", " <|im_end|>"]),
    ],
)
def test_segments(text: str, segments: list[str]) -> None:
    assert split(text) == segments


def test_a_segment_is_bounded() -> None:
    marks = TokenMarks.from_texts(["x"])
    numbers = segment_numbers(np.zeros(LONGEST * 2 + 3, np.int64), marks)
    assert np.bincount(numbers).tolist() == [LONGEST, LONGEST, 3]


def test_unknown_ids_are_plain_text() -> None:
    marks = TokenMarks.from_texts(["a", "."])
    assert segment_numbers(np.array([0, 99, -5, 1, 7]), marks).tolist() == [0] * 5
    assert len(segment_numbers(np.empty(0, np.int64), marks)) == 0


def test_decoder_is_not_asked_about_special_tokens() -> None:
    asked: list[int] = []

    def decode(token: int) -> str:
        asked.append(token)
        return "a\n"

    marks = TokenMarks.from_decoder(decode, 3, special=[1])
    assert asked == [0, 2] and marks.breaks.tolist() == [True] * 3 and marks.spaced.tolist() == [False, True, False]
