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
from intentkv.score.intent import TOP, IntentScorer, segment_worth
from tests.unit.test_baselines import positions_only


def loop(values: torch.Tensor, segments: torch.Tensor, top: int) -> list[float]:
    """One token at a time, in float64."""
    sums = []
    for segment in segments.tolist():
        mine = sorted((float(v) for v, s in zip(values, segments, strict=True) if int(s) == segment), reverse=True)
        sums.append(sum(mine[:top]) / len(mine))
    return sums


@given(
    st.lists(st.tuples(st.integers(0, 3), st.floats(0, 20, width=32)), max_size=40),
    st.integers(1, 8),
)
def test_the_worth_of_segments_equals_the_loop(steps: list[tuple[int, float]], top: int) -> None:
    """Segments of any length, with gaps in their numbers; values with ties."""
    segments = torch.tensor([step for step, _ in steps], dtype=torch.int64).cumsum(0)
    values = torch.tensor([value for _, value in steps], dtype=torch.float32)
    worth = segment_worth(values, segments, top)
    expected = torch.tensor(loop(values, segments, top), dtype=torch.float64)
    torch.testing.assert_close(worth, expected.float())  # up to 8 additions and a division in float32


def test_a_fact_beats_filler_whole() -> None:
    """A short sentence with one long number outlives a long one of mildly surprising words, and stays whole."""
    surprise = torch.tensor([0.1, 0.2, 9.0, 8.0, 0.1] + [1.2] * 20)
    segments = torch.tensor([3] * 5 + [7] * 20)
    x = dataclasses.replace(positions_only(torch.arange(25)), surprise=surprise, segments=segments)
    x = dataclasses.replace(x, dialogue=torch.zeros(25, dtype=torch.bool))
    scores = IntentScorer().score(x)
    assert scores[:5].unique().numel() == 1 and scores[5:].unique().numel() == 1
    assert scores[0] == pytest.approx(17.3 / 5) and scores[5] == pytest.approx(1.2 * TOP / 20)


def test_the_dialogue_comes_first() -> None:
    surprise, said = torch.tensor([9.0, 9.0, 0.1, 0.1, 9.0]), torch.tensor([False, False, True, True, False])
    x = dataclasses.replace(positions_only(torch.arange(5)), surprise=surprise, segments=torch.arange(5), dialogue=said)
    assert IntentScorer().score(x).tolist() == [9.0, 9.0, math.inf, math.inf, 9.0]


@pytest.mark.parametrize("need", ["surprise", "dialogue"])
def test_without_observation_it_says_so(need: str) -> None:
    given = {"surprise": torch.zeros(4), "dialogue": torch.zeros(4, dtype=torch.bool)}
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
