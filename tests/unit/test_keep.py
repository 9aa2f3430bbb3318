"""Which positions go: never a forced one, exactly as many as the budget says, the worst first."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from intentkv.keep.budget import Budget
from intentkv.keep.forced import forced_mask, last_page, whole_pages
from intentkv.keep.select import candidates, choose_drop, droppable
from intentkv.observe.spans import Spans

BUDGETS = st.one_of(
    st.builds(Budget, st.just("fixed"), st.integers(1, 150)),
    st.builds(Budget, st.just("share"), st.floats(0, 100, exclude_min=True)),
)
NO_HOLES = np.empty(0, np.int64)


@st.composite
def events(draw: st.DrawFn) -> tuple[NDArray[np.float32], NDArray[np.bool_], NDArray[np.int64], Budget, int]:
    """Arguments of `choose_drop`; few different scores, so that ties are common."""
    length = draw(st.integers(0, 120))
    forced = np.array(draw(st.lists(st.booleans(), min_size=length, max_size=length)), np.bool_)
    holes = np.array(sorted(draw(st.sets(st.integers(0, 119), max_size=40))), np.int64)
    holes = holes[holes < length]
    n = len(candidates(forced, holes))
    values = st.sampled_from([-np.inf, -1.0, 0.0, 0.5, 1.0, 3.0, np.inf])
    scores = np.array(draw(st.lists(values, min_size=n, max_size=n)), np.float32)
    return scores, forced, holes, draw(BUDGETS), draw(st.integers(0, 60))


@given(events())
def test_the_drop_is_exact_and_never_forced_nor_dropped_before(event: tuple) -> None:
    _, forced, holes, budget, trigger = event
    drop = choose_drop(*event)
    assert drop.dtype == np.int64
    assert (np.diff(drop) > 0).all()
    assert not forced[drop].any()
    assert not np.isin(drop, holes).any()

    live_history = int((~forced).sum()) - int((~forced)[holes].sum())
    excess = live_history - budget.tokens(int((~forced).sum()))
    assert len(drop) == (excess if excess >= max(trigger, 1) else 0)
    assert len(drop) == droppable(forced, holes, budget, trigger)


@pytest.mark.parametrize(
    ("budget", "history", "share"),
    [("25%", 1000, 0.25), (250, 1000, 0.25), (8192, 1000, 1.0), ("100%", 7, 1.0), ("1%", 10, 0.1), (5, 0, 1.0)],
)
def test_the_share_of_the_history_that_a_budget_is(budget: object, history: int, share: float) -> None:
    """Above 0 and at most 1, however short the history."""
    assert Budget.parse(budget).share(history) == share


@given(events())
def test_what_stays_is_no_worse_than_what_goes_and_later_where_equal(event: tuple) -> None:
    scores, forced, holes, _, _ = event
    drop = choose_drop(*event)
    positions = candidates(forced, holes)
    gone = np.isin(positions, drop)
    if gone.any() and not gone.all():
        assert scores[~gone].min() >= scores[gone].max()
        border = scores[gone].max()
        tied = scores == border
        if (tied & ~gone).any():
            assert positions[tied & ~gone].min() > positions[tied & gone].max()


@given(events())
def test_the_decision_is_deterministic_and_changes_no_input(event: tuple) -> None:
    copies = [part.copy() if isinstance(part, np.ndarray) else part for part in event]
    first, second = choose_drop(*event), choose_drop(*copies)
    assert np.array_equal(first, second)
    assert all(np.array_equal(a, b) for a, b in zip(event[:3], copies[:3], strict=True))


@given(st.integers(0, 2**32 - 1), st.lists(st.integers(1, 60), min_size=1, max_size=6), BUDGETS, st.integers(1, 30))
def test_over_the_turns_of_a_session_dropped_stays_dropped_and_live_stays_within_budget(
    seed: int, turns: list[int], budget: Budget, trigger: int
) -> None:
    random = np.random.default_rng(seed)
    holes, length = NO_HOLES, 0
    for added in turns:
        start, length = length, length + added
        forced = forced_mask(length, Spans(min(4, length), (start, length)), recent=3)
        scores = random.random(len(candidates(forced, holes))).astype(np.float32)
        drop = choose_drop(scores, forced, holes, budget, trigger)
        assert not np.isin(drop, holes).any()
        holes = np.sort(np.concatenate([holes, drop]))
        live = length - len(holes)
        assert live <= forced.sum() + budget.tokens(int((~forced).sum())) + (0 if len(drop) else trigger - 1)
        if len(drop):
            again = choose_drop(np.zeros(len(candidates(forced, holes)), np.float32), forced, holes, budget, 1)
            assert len(again) == 0


def test_a_share_counts_what_was_dropped_before() -> None:
    forced = np.zeros(1000, np.bool_)
    holes = np.arange(500)
    assert droppable(forced, holes, Budget("share", 25.0), 1) == 250
    assert droppable(forced, holes, Budget("share", 50.0), 1) == 0


def test_the_trigger_is_the_least_that_counts() -> None:
    forced = np.zeros(100, np.bool_)
    scores = np.arange(100, dtype=np.float32)
    assert len(choose_drop(scores, forced, NO_HOLES, Budget("fixed", 90), 11)) == 0
    assert choose_drop(scores, forced, NO_HOLES, Budget("fixed", 90), 10).tolist() == list(range(10))


def test_equal_scores_keep_the_latest() -> None:
    drop = choose_drop(np.zeros(10, np.float32), np.zeros(10, np.bool_), NO_HOLES, Budget("fixed", 4), 1)
    assert drop.tolist() == [0, 1, 2, 3, 4, 5]


def test_holes_beyond_the_row_are_no_candidates() -> None:
    assert candidates(np.array([True, False, False]), np.array([1, 3, 9])).tolist() == [2]


def test_scores_that_do_not_fit_are_refused() -> None:
    with pytest.raises(ValueError, match=r"expected 10 scores, one a candidate, got \[9\]"):
        choose_drop(np.zeros(9, np.float32), np.zeros(10, np.bool_), NO_HOLES, Budget("fixed", 4), 1)


def test_a_score_that_is_not_a_number_is_refused() -> None:
    scores = np.zeros(10, np.float32)
    scores[3] = np.nan
    forced = np.array([True] + [False] * 10)
    with pytest.raises(ValueError, match="got NaN for position 4"):
        choose_drop(scores, forced, NO_HOLES, Budget("fixed", 4), 1)


@given(st.integers(0, 50), st.integers(0, 60), st.tuples(st.integers(0, 60), st.integers(0, 60)), st.integers(0, 60))
def test_the_forced_set_is_prefix_query_and_tail(
    length: int, system_end: int, query: tuple[int, int], recent: int
) -> None:
    start, end = sorted(query)
    mask = forced_mask(length, Spans(system_end, (start, end)), recent)
    expected = [i < system_end or start <= i < end or i >= length - recent for i in range(length)]
    assert mask.tolist() == expected


@given(st.lists(st.booleans(), max_size=70), st.sampled_from([1, 2, 16]))
def test_whole_pages_rounds_out_and_nothing_more(mask: list[bool], page_size: int) -> None:
    rounded = whole_pages(np.array(mask, np.bool_), page_size)
    for position, forced in enumerate(rounded):
        page = range(position // page_size * page_size, position // page_size * page_size + page_size)
        assert forced == (page[-1] >= len(mask) or any(mask[other] for other in page))


@given(st.integers(0, 20), st.data(), st.integers(0, 400), st.integers(1, 100), st.sampled_from([2, 16]))
def test_pages_go_whole_and_the_budget_is_not_cut(
    pages: int, data: st.DataObject, budget: int, trigger: int, page_size: int
) -> None:
    """The worst pages by mean score, as many as fit above the budget."""
    length = pages * page_size
    forced = np.repeat(
        np.array(data.draw(st.lists(st.booleans(), min_size=pages, max_size=pages)), np.bool_), page_size
    )
    free = candidates(forced, NO_HOLES)
    scores = np.array(data.draw(st.lists(st.integers(0, 9), min_size=len(free), max_size=len(free))), np.float32)
    drop = choose_drop(scores, forced, NO_HOLES, Budget("fixed", max(1, budget)), trigger, page_size, True)
    excess = len(free) - max(1, budget)
    assert len(drop) == (excess // page_size * page_size if excess >= trigger else 0)
    gone = np.zeros(length, np.bool_)
    gone[drop] = True
    by_page = gone.reshape(-1, page_size)
    assert (by_page.all(axis=1) == by_page.any(axis=1)).all()
    means = scores.reshape(-1, page_size).mean(axis=1)
    kept = np.isin(free[::page_size], drop, invert=True)
    if kept.any() and not kept.all():
        assert means[kept].min() >= means[~kept].max()


def test_half_pages_are_refused() -> None:
    with pytest.raises(ValueError, match="whole pages of 16"):
        choose_drop(np.zeros(10, np.float32), np.zeros(10, np.bool_), NO_HOLES, Budget("fixed", 4), 1, 16, True)


@given(st.lists(st.booleans(), max_size=70), st.sampled_from([1, 2, 16]))
def test_the_page_that_is_not_full_yet_is_forced(mask: list[bool], page_size: int) -> None:
    forced = last_page(np.array(mask, np.bool_), page_size)
    full = len(mask) // page_size * page_size
    assert forced.tolist() == mask[:full] + [True] * (len(mask) - full)


@given(events(), st.sampled_from([2, 16]))
def test_single_tokens_go_by_the_page_full(event: tuple, page_size: int) -> None:
    """What goes is the beginning of what goes with pages of one: the worst, as many as fill whole pages."""
    scores, forced, holes, *_ = event
    drop = choose_drop(*event, page_size)
    fewer = len(choose_drop(*event)) // page_size * page_size
    positions = candidates(forced, holes)
    assert drop.tolist() == sorted(positions[np.argsort(scores, kind="stable")[:fewer]].tolist())
