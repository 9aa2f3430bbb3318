"""Confidence: its sign, its trace, its trend; and the budget that follows it."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from intentkv.keep.auto_budget import AutoBudgets
from intentkv.observe.confidence import STRIDE, WINDOW, ConfidenceTrace, _largest, token_confidence

VOCABULARY = 1000


def loop_confidence(logits: list[float], k: int) -> float:
    top = sorted(logits, reverse=True)[:k]
    total = np.log(np.sum(np.exp(np.array(logits, np.float64) - top[0]))) + top[0]
    return -float(np.mean([logit - total for logit in top]))


def test_a_peaked_distribution_is_the_more_confident() -> None:
    """The sign trap: higher is surer."""
    flat, peaked = torch.zeros(VOCABULARY), torch.zeros(VOCABULARY)
    peaked[7] = 30.0
    low, high = token_confidence(torch.stack([flat, peaked])).tolist()
    assert low == pytest.approx(np.log(VOCABULARY))
    assert high > 2 * low


def test_it_rises_as_one_of_k_tokens_takes_the_mass() -> None:
    shares = torch.tensor([1 / 20, 0.1, 0.5, 0.9, 0.99, 0.9999])
    p = torch.full((len(shares), VOCABULARY), 1e-30)
    p[:, :20] = ((1 - shares) / 19)[:, None]
    p[:, 0] = shares
    series = token_confidence(p.log())
    assert (series.diff() > 0).all()


def test_its_least_value_is_log_k_and_not_the_flat_distribution() -> None:
    """A property of the published formula: mass spread over more than k tokens counts as surer than over just k."""
    even = torch.full((1, VOCABULARY), -60.0)
    even[0, :20] = 0.0
    assert token_confidence(even).item() == pytest.approx(np.log(20))
    many = (
        torch.randn(200, VOCABULARY, generator=torch.Generator().manual_seed(0)) * torch.logspace(-1, 1, 200)[:, None]
    )
    assert token_confidence(many).min() >= np.log(20)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("vocabulary", [5, 19, 20, 21, 400, 1280, 1344, 1349, 49152])
def test_it_is_what_the_formula_says(vocabulary: int, dtype: torch.dtype) -> None:
    logits = (3 * torch.randn(6, vocabulary, generator=torch.Generator().manual_seed(1))).to(dtype)
    before = logits.clone()
    expected = [loop_confidence(row.double().tolist(), 20) for row in logits]
    assert token_confidence(logits).tolist() == pytest.approx(expected, rel=1e-5)
    assert torch.equal(logits, before)


@given(st.integers(20 * 64, 3000), st.integers(1, 40), st.integers(0, 2**32 - 1))
def test_the_likeliest_are_found_wherever_they_lie(vocabulary: int, values: int, seed: int) -> None:
    """Few values, so that many are equal, and most of them -inf: as `topk` over the whole vocabulary, bit for bit."""
    rng = np.random.default_rng(seed)
    logits = torch.from_numpy(rng.integers(0, values, (3, vocabulary)).astype(np.float32))
    logits[torch.from_numpy(rng.random((3, vocabulary)) < rng.random())] = -torch.inf
    logits[:, 0] = 1.0
    found = _largest(logits, 20).sort(dim=1).values
    assert torch.equal(found, logits.topk(20, dim=1).values.sort(dim=1).values)


def test_a_forbidden_token_does_not_hide_the_others() -> None:
    logits = torch.zeros(1, 30)
    logits[0, 3:] = -torch.inf
    confidence = token_confidence(logits).item()
    assert np.isfinite(confidence) and confidence > 10


def loop_trace(series: list[float]) -> list[float]:
    starts = range(0, len(series) - WINDOW + 1, STRIDE)
    minima = [min(series[start : start + WINDOW]) for start in starts]
    if not minima:
        return []
    bound = np.percentile(minima, 10)
    return [value for value in minima if value <= bound]


@given(st.integers(0, 700), st.integers(0, 2**32 - 1))
def test_the_trace_is_the_lowest_tenth_of_the_window_minima(length: int, seed: int) -> None:
    series = np.random.default_rng(seed).normal(10, 3, length).round(1).tolist()
    trace = ConfidenceTrace()
    for value in series:
        trace.append(value)
    expected = loop_trace(series)
    assert trace.trace().tolist() == expected
    slope = np.polyfit(np.arange(len(expected)), expected, 1)[0] if len(expected) > 1 else 0.0
    assert trace.slope() == pytest.approx(slope, abs=1e-9)


def test_one_low_token_is_all_of_a_short_trace() -> None:
    """It is the minimum of the eight windows that hold it, and a tenth of 80 windows: no trend before some 700 tokens."""
    series = np.random.default_rng(0).normal(10, 1, 1000)
    series[200] = 1.0
    trace, slopes = ConfidenceTrace(), {}
    for value in series:
        trace.append(float(value))
        slopes[len(trace)] = trace.slope()
    assert all(slopes[windows] == 0 for windows in range(30, 72)) and slopes[len(trace)] > 0


def test_what_is_no_number_is_left_out() -> None:
    trace = ConfidenceTrace()
    for i in range(2 * WINDOW):
        trace.append(float("nan") if i % 2 else float(i))
    assert len(trace) == 1


def tell(budgets: AutoBudgets, session: str, series: np.ndarray) -> None:
    for value in series:
        budgets.observe(session, float(value))


def falling(length: int) -> np.ndarray:
    return np.linspace(20, 10, length)


def test_the_budget_grows_where_confidence_falls_and_never_shrinks() -> None:
    budgets = AutoBudgets(512, 3000, 1.75, 8)
    assert budgets.decide("a").tokens(10**6) == 512
    expected = [896, 1568, 2744, 3000, 3000]
    for tokens in expected:
        tell(budgets, "a", falling(600))
        assert budgets.decide("a").tokens(10**6) == tokens
        assert budgets.slope("a") < 0
    tell(budgets, "a", np.linspace(30, 60, 20000))
    before = budgets.decide("a").tokens(0)
    tell(budgets, "a", np.linspace(60, 90, 20000))
    assert budgets.decide("a").tokens(0) == before


def test_a_rising_or_level_confidence_leaves_the_budget_alone() -> None:
    for series in (falling(600)[::-1], np.full(600, 12.0)):
        budgets = AutoBudgets(512, 30000, 1.75, 8)
        tell(budgets, "a", series)
        assert budgets.decide("a").tokens(0) == 512
        assert budgets.slope("a") >= 0


def test_no_decision_without_new_evidence() -> None:
    budgets = AutoBudgets(512, 30000, 1.75, 8)
    tell(budgets, "a", falling(600))
    assert [budgets.decide("a").tokens(0) for _ in range(3)] == [896] * 3
    tell(budgets, "a", falling(STRIDE - 1)[:1])
    assert budgets.decide("a").tokens(0) == 896


def test_sessions_do_not_meet_and_end() -> None:
    budgets = AutoBudgets(512, 30000, 1.75, 2)
    tell(budgets, "a", falling(600))
    assert (budgets.decide("a").tokens(0), budgets.decide("b").tokens(0)) == (896, 512)
    budgets.decide("c")
    assert len(budgets) == 2 and budgets.decide("a").tokens(0) == 512
    budgets.clear()
    assert len(budgets) == 0


@pytest.mark.parametrize("bad", [(0, 10, 2.0, 1), (11, 10, 2.0, 1), (1, 10, 1.0, 1), (1, 10, 2.0, 0)])
def test_bad_settings_are_refused(bad: tuple) -> None:
    with pytest.raises(ValueError, match="expected 1 <= first"):
        AutoBudgets(*bad)
