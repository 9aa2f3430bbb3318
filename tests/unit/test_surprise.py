"""Surprise by segment against an obvious loop."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from intentkv.score.surprise import TOP, SurpriseScorer, segment_sums
from tests.unit.test_baselines import positions_only


def loop(values: torch.Tensor, segments: torch.Tensor, top: int) -> list[float]:
    """One token at a time, in float64."""
    sums = []
    for segment in segments.tolist():
        mine = sorted((float(v) for v, s in zip(values, segments, strict=True) if int(s) == segment), reverse=True)
        sums.append(sum(mine[:top]))
    return sums


@given(
    st.lists(st.tuples(st.integers(0, 3), st.floats(0, 20, width=32)), max_size=40),
    st.integers(1, 8),
)
def test_segment_sums_equal_the_loop(steps: list[tuple[int, float]], top: int) -> None:
    """Segments of any length, with gaps in their numbers; values with ties."""
    segments = torch.tensor([step for step, _ in steps], dtype=torch.int64).cumsum(0)
    values = torch.tensor([value for _, value in steps], dtype=torch.float32)
    sums = segment_sums(values, segments, top)
    torch.testing.assert_close(sums.double(), torch.tensor(loop(values, segments, top), dtype=torch.float64))


def test_a_fact_beats_filler_whole() -> None:
    """A short sentence with one long number outlives a long one of mildly surprising words, and stays whole."""
    surprise = torch.tensor([0.1, 0.2, 9.0, 8.0, 0.1] + [1.2] * 20)
    segments = torch.tensor([3] * 5 + [7] * 20)
    x = dataclasses.replace(positions_only(torch.arange(25)), surprise=surprise, segments=segments)
    scores = SurpriseScorer().score(x)
    assert scores[:5].unique().numel() == 1 and scores[5:].unique().numel() == 1
    assert scores[0] == pytest.approx(17.4) and scores[5] == pytest.approx(1.2 * TOP)


def test_without_observation_it_says_so() -> None:
    x = dataclasses.replace(positions_only(torch.arange(4)), surprise=None)
    with pytest.raises(ValueError, match="surprise: expected 'surprise' in its input"):
        SurpriseScorer().score(x)
