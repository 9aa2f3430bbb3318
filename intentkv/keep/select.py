"""From scores and a budget to the positions that go."""

import numpy as np
from numpy.typing import NDArray

from intentkv.keep.budget import Budget


def candidates(forced: NDArray[np.bool_], holes: NDArray[np.int64]) -> NDArray[np.int64]:
    """Positions that may be dropped: neither forced nor dropped before. Sorted int64.

    Args:
        forced: `[length]` bool, from `forced_mask`.
        holes: positions dropped at earlier events.
    """
    free = ~forced
    free[holes[holes < len(forced)]] = False
    return np.flatnonzero(free)


def droppable(forced: NDArray[np.bool_], holes: NDArray[np.int64], budget: Budget, trigger: int) -> int:
    """How many candidates an event would drop now; 0 where that is less than `trigger`.

    Depends on lengths alone, so that all ranks agree before anything is scored. A share is taken of all logical history
    positions, the dropped ones included: otherwise every event would take the same share of what the last one left.
    """
    history = int(np.count_nonzero(~forced))
    excess = len(candidates(forced, holes)) - budget.tokens(history)
    return excess if excess >= max(1, trigger) else 0


def choose_drop(
    scores: NDArray[np.float32],
    forced: NDArray[np.bool_],
    holes: NDArray[np.int64],
    budget: Budget,
    trigger: int,
    page_size: int = 1,
    whole_pages: bool = False,
) -> NDArray[np.int64]:
    """Positions to drop at this event, sorted int64; none unless at least `trigger` of them are beyond the budget.

    The best `budget` candidates stay; of equal scores the later position stays. As many go as fill whole pages: the rest
    of a page would free nothing. With `whole_pages` pages are ranked by the mean of their scores, and go as a whole.

    Args:
        scores: `[n]` float32, one for each of `candidates(forced, holes)`, in that order; higher = keep.
        forced: `[length]` bool, from `forced_mask`.
        holes: positions dropped at earlier events.
        budget: tokens of history to keep.
        trigger: an event drops at least this many.
        page_size: tokens a page.
        whole_pages: choose among pages; `forced` (see `keep.forced.whole_pages`) and `holes` are whole pages.

    Raises:
        ValueError: the scores do not fit the candidates, one is not a number, or the candidates are not whole pages.
    """
    positions = candidates(forced, holes)
    if scores.shape != positions.shape:
        raise ValueError(f"choose_drop: expected {len(positions)} scores, one a candidate, got {list(scores.shape)}")
    if np.isnan(scores).any():
        raise ValueError(f"choose_drop: expected numbers, got NaN for position {positions[np.isnan(scores)][0]}")
    if whole_pages and (len(scores) % page_size or (positions[::page_size] % page_size).any()):
        raise ValueError(f"choose_drop: expected candidates in whole pages of {page_size}, got {len(scores)}")
    excess = droppable(forced, holes, budget, trigger) // page_size * page_size
    if whole_pages:
        scores = np.repeat(scores.reshape(-1, page_size).mean(axis=1), page_size)
    worst_first = np.argsort(scores, kind="stable")  # stable: of equal scores the earlier position goes first
    return np.sort(positions[worst_first[:excess]])
