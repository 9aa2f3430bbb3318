"""Sentences, lines and records, found from tokens."""

from __future__ import annotations

import re

import numpy as np
import pytest

from intentkv.observe.segments import LONGEST, TokenMarks, segment_numbers, word_numbers

PIECES = r"<\|[a-z_]+\|>|\},|\],| ?[A-Za-z]+|[0-9]+| ?[\{\[]|\n|[\u2e80-\u9fff]|[^\w\s]| "


def split(text: str, *, words: bool = False) -> list[str]:
    """The segments of `text`, cut into word-like tokens, or the words of the segments."""
    tokens = re.findall(PIECES, text)
    assert "".join(tokens) == text
    vocabulary = sorted(set(tokens))
    special = [i for i, token in enumerate(vocabulary) if token.startswith("<|")]
    marks = TokenMarks.from_texts(vocabulary, special)
    ids = np.array([vocabulary.index(t) for t in tokens])
    numbers = segment_numbers(ids, marks)
    if words:
        numbers = word_numbers(ids, numbers, marks)
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


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("Bill KX-402, paid. Not so", ["Bill", " KX-402", ",", " paid.", " Not", " so"]),
        ("see /srv/0f74ff18/core.py\nnow", ["see", " /srv/0f74ff18/core.py", "\n", "now"]),
        ('{"id":17,"to":"me"}', ["{", '"id', '"', ":17", ",", '"to', '"', ":", '"me', '"', "}"]),
        ("f(x=12)", ["f", "(x", "=12", ")"]),
        ("<|im_start|>user\nHi", ["<|im_start|>", "user", "\n", "Hi"]),
        ("部门代码", ["部", "门", "代", "码"]),
    ],
)
def test_words(text: str, words: list[str]) -> None:
    assert split(text, words=True) == words


def test_a_segment_is_bounded() -> None:
    marks = TokenMarks.from_texts(["x"])
    numbers = segment_numbers(np.zeros(LONGEST * 2 + 3, np.int64), marks)
    assert np.bincount(numbers).tolist() == [LONGEST, LONGEST, 3]


def test_unknown_ids_are_plain_text() -> None:
    marks = TokenMarks.from_texts(["a", "."])
    assert segment_numbers(np.array([0, 99, -5, 1, 7]), marks).tolist() == [0] * 5
    nothing = np.empty(0, np.int64)
    assert len(segment_numbers(nothing, marks)) == len(word_numbers(nothing, nothing, marks)) == 0


def test_what_was_generated_is_a_word_a_token() -> None:
    marks = TokenMarks.from_texts(["a", "b"])
    ids = np.array([0, 1, -1, -1, 1, 9])
    assert word_numbers(ids, np.array([0, 0, 0, 0, 0, 1]), marks).tolist() == [0, 0, 1, 2, 2, 3]


def test_decoder_is_not_asked_about_special_tokens() -> None:
    asked: list[int] = []

    def decode(token: int) -> str:
        asked.append(token)
        return "a\n"

    marks = TokenMarks.from_decoder(decode, 3, special=[1])
    assert asked == [0, 2] and marks.breaks.tolist() == [True] * 3 and marks.spaced.tolist() == [False, True, False]
