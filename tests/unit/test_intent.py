"""The default scorer against an obvious loop."""

from __future__ import annotations

import dataclasses
import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from intentkv.keep.dialogue import newest_that_fit, room
from intentkv.score.intent import LENGTH, TOP, UNGUESSED, IntentScorer, largest_in_segments, word_surprise
from tests.unit.test_baselines import positions_only


def loop(surprise: list[float], words: list[int], segments: list[int], top: int, most: float) -> list[float]:
    """For each token what the words of its segment come to, one word at a time, in float64."""
    sums = []
    for segment in segments:
        totals: dict[int, float] = {}
        for value, word, of in zip(surprise, words, segments, strict=True):
            if of == segment:
                totals[word] = totals.get(word, 0.0) + value
        sums.append(sum(sorted((min(total, most) for total in totals.values()), reverse=True)[:top]))
    return sums


@given(
    st.lists(st.tuples(st.integers(0, 2), st.integers(0, 2), st.floats(0, 20, width=32)), max_size=40),
    st.integers(1, 8),
    st.sampled_from([3.0, UNGUESSED, math.inf]),
)
def test_words_and_segments_equal_the_loop(steps: list[tuple[int, int, float]], top: int, most: float) -> None:
    """Words and segments of any length, with gaps in their numbers; values with ties."""
    segments = torch.tensor([step for step, _, _ in steps], dtype=torch.int64).cumsum(0)
    words = torch.tensor([max(step, of) for step, of, _ in steps], dtype=torch.int64).cumsum(0)
    surprise = torch.tensor([value for _, _, value in steps], dtype=torch.float32)
    sums, lengths = largest_in_segments(word_surprise(surprise, words, most), segments, top)
    expected = loop(surprise.tolist(), words.tolist(), segments.tolist(), top, most)
    torch.testing.assert_close(sums, torch.tensor(expected, dtype=torch.float32))  # up to 40 additions in float32
    assert lengths.tolist() == [segments.tolist().count(segment) for segment in segments.tolist()]


def score(surprise: list[float], words: list[int], segments: list[int], said: list[bool] | None = None) -> list[float]:
    """What `intent` gives each token of a context without any dialogue, or with it where `said`."""
    x = dataclasses.replace(
        positions_only(torch.arange(len(surprise))),
        surprise=torch.tensor(surprise),
        words=torch.tensor(words),
        segments=torch.tensor(segments),
        dialogue=torch.tensor(said or [False] * len(surprise)),
    )
    return IntentScorer().score(x).tolist()


def test_a_fact_beats_filler_whole() -> None:
    """A short sentence with a number outlives a long one of mildly surprising words, and stays whole."""
    fact, filler = [3.0, 0.2, 2.4, 2.3, 2.2, 2.4, 0.1], [1.2] * 20
    words, segments = [0, 1, 2, 2, 2, 2, 3, *range(4, 24)], [3] * 7 + [7] * 20
    scores = score(fact + filler, words, segments)
    assert len(set(scores[:7])) == 1 and len(set(scores[7:])) == 1
    assert scores[0] == pytest.approx((3.0 + 0.2 + UNGUESSED + 0.1) / 7**LENGTH)
    assert scores[7] == pytest.approx(1.2 * TOP / 20**LENGTH) and scores[0] > scores[7]


def test_a_hash_is_one_word() -> None:
    """However many nats it has, it is worth no more than a number, and costs more."""
    scores = score([3.0, 9.2] + [4.0] * 40, [0, 1] + [2] * 40, [0, 0] + [1] * 40)
    assert scores[-1] == pytest.approx(UNGUESSED / 40**LENGTH) and scores[0] > scores[-1]


def test_the_dialogue_comes_first() -> None:
    scores = score([4.0, 4.0, 0.1, 0.1, 4.0], [0, 1, 2, 3, 4], [0, 1, 2, 3, 4], [False, False, True, True, False])
    assert scores == [4.0, 4.0, math.inf, math.inf, 4.0]


@pytest.mark.parametrize("need", ["surprise", "dialogue", "words"])
def test_without_observation_it_says_so(need: str) -> None:
    given = {
        "surprise": torch.zeros(4),
        "dialogue": torch.zeros(4, dtype=torch.bool),
        "words": torch.arange(4),
    }
    x = dataclasses.replace(positions_only(torch.arange(4)), **{**given, need: None})
    with pytest.raises(ValueError, match=f"intent: expected '{need}' in its input"):
        IntentScorer().score(x)


@pytest.mark.parametrize(
    ("tokens", "kept"),
    [
        (3, []),
        (4, [(0, 4)]),  # the newest has 5, of the oldest 4 are live
        (5, [(20, 25)]),
        (8, [(20, 25)]),
        (10, [(20, 25), (0, 4)]),  # the one between has 6
        (11, [(10, 16), (20, 25)]),
        (15, [(10, 16), (20, 25), (0, 4)]),
    ],
)
def test_the_newest_messages_that_fit(tokens: int, kept: list[tuple[int, int]]) -> None:
    said = [(0, 8), (10, 16), (20, 25)]
    positions = np.setdiff1d(np.arange(40), np.arange(4, 8))  # half of the oldest message was dropped before
    chosen = positions[newest_that_fit(said, positions, tokens)]
    assert chosen.tolist() == sorted(p for start, end in kept for p in range(start, end))


def test_the_dialogue_has_a_third_of_the_budget_at_most_and_less_where_it_is_tight() -> None:
    assert [room(budget, 2400) for budget in (0, 300, 600, 1200, 2400)] == [0, 25, 100, 400, 800]
    assert room(10, 0) == 3


def test_a_message_too_long_is_passed_over() -> None:
    chosen = newest_that_fit([(0, 5), (5, 95)], np.arange(100), tokens=20)
    assert np.flatnonzero(chosen).tolist() == list(range(5))
