"""Arithmetic of rows: which positions are dropped, which live, and what stands in a row where a position was dropped.

Positions are logical, sorted ascending, `[n]` int64 on the host. Everything here is a pure function of host arrays, so
every tensor-parallel rank computes the same result without asking a device.
"""

from typing import Final

import numpy as np

NO_POSITIONS: Final = np.empty(0, dtype=np.int64)
NO_POSITIONS.flags.writeable = False


def page_floor(length: int, page_size: int) -> int:
    """The largest multiple of `page_size` that is not above `length`."""
    return length // page_size * page_size


def page_ceil(length: int, page_size: int) -> int:
    """The smallest multiple of `page_size` that is not below `length`."""
    return page_floor(length + page_size - 1, page_size)


def tombstones(positions: np.ndarray, page_size: int) -> np.ndarray:
    """What the row says at dropped `positions`: a slot of page 0, which SGLang reserves and never allocates.

    Position modulo page size (slot 0 for pages of one) keeps page arithmetic aligned: the slot after a dropped page's
    last position starts a page, as the paged allocator expects of the last slot of a prefix.
    """
    return positions % page_size


def below(positions: np.ndarray, end: int) -> np.ndarray:
    """The `positions` smaller than `end`."""
    return positions[: np.searchsorted(positions, end)]


def live_positions(start: int, end: int, dropped: np.ndarray) -> np.ndarray:
    """Positions of `[start, end)` that are not in `dropped`, `[n]` int64."""
    live = np.ones(max(0, end - start), dtype=bool)
    inside = dropped[np.searchsorted(dropped, start) : np.searchsorted(dropped, end)]
    live[inside - start] = False
    return np.flatnonzero(live) + start


def merge(holes: np.ndarray, drop: np.ndarray) -> np.ndarray:
    """The union of two sets of positions, `[n]` int64."""
    return np.union1d(holes, drop)


def droppable(
    drop: np.ndarray, holes: np.ndarray, length: int, page_size: int, whole_pages: bool = False
) -> np.ndarray:
    """The part of `drop` that a row of `length` computed tokens can really lose, `[n]` int64.

    The page of the last computed token stays: the next token continues it. What is already a hole is not dropped twice.

    Args:
        drop: positions somebody wants dropped, `[n]` integers in any order.
        holes: positions dropped before.
        length: computed tokens of the request.
        page_size: tokens a page.
        whole_pages: narrow to pages of which every position is dropped: attention reads nothing smaller.
    """
    limit = page_floor(max(0, length - 1), page_size)
    wanted = np.setdiff1d(np.asarray(drop, dtype=np.int64), holes)
    wanted = wanted[(wanted >= 0) & (wanted < limit)]
    if page_size == 1 or not whole_pages:
        return wanted
    pages, counts = np.unique(wanted // page_size, return_counts=True)
    whole = pages[counts == page_size]
    return np.ravel(whole[:, None] * page_size + np.arange(page_size))


def common_prefix(a: np.ndarray, b: np.ndarray) -> int:
    """How many leading entries of two arrays of token ids agree."""
    n = min(len(a), len(b))
    differs = a[:n] != b[:n]
    return int(differs.argmax()) if differs.any() else n
