"""In-place compaction: which private survivors move where, so that whole pages come back (ActKV, section 7.2).

With pages of more than one slot, dropping single tokens leaves holes in pages that nobody can reuse. The survivors of
the emptiest pages move into the holes of the fullest. Pages are either left or entered, never both, so sources and
destinations do not meet, all copies run at once, and no buffer is needed:

    before   |A..B|.CD.|EFG.|..H.|      8 survivors in 4 pages of 4, two pages are enough
    after    |....|ACDB|EFGH|....|      A, B and H have moved; the first and the last page are free

The paper packs into the last pages of a request, where it finds survivors to be densest. Ranking pages by their
survivors is the same where that holds, and moves less where it does not.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True)
class CompactionPlan:
    """What to copy, and what is free afterwards.

    Attributes:
        positions: `[n]` int64, logical positions whose entries move, one a copy.
        sources, destinations: `[n]` int64 each, slots. No slot is in both, none stands twice.
        freed: `[p]` int64 ascending, pages that hold no survivor after the copies.
    """

    positions: NDArray[np.int64]
    sources: NDArray[np.int64]
    destinations: NDArray[np.int64]
    freed: NDArray[np.int64]

    def apply_to(self, row: NDArray[np.int64]) -> NDArray[np.int64]:
        """The row after the copies: `[length]` int64, a new array."""
        moved = row.copy()
        moved[self.positions] = self.destinations
        return moved


def plan_compaction(
    row: NDArray[np.int64], keep: NDArray[np.bool_], private: NDArray[np.bool_], page_size: int
) -> CompactionPlan:
    """Plan the copies for one request. A pure function of host arrays, equal on all ranks.

    Only pages that the request owns alone take part; what the tree owns or another row maps is neither moved, nor
    written to, nor freed. Of pages with equally many survivors the later ones are packed into.

    Args:
        row: `[length]` int64, logical position -> slot; tombstones where positions were dropped before.
        keep: `[length]` bool, positions that survive. False at tombstones.
        private: `[length]` bool, positions whose slot belongs to this request alone. A page takes part where all of its
            positions in the row are private and it holds no other slots in use: pass False for the page that the next
            token will continue.
        page_size: slots a page.

    Raises:
        ValueError: arrays that do not fit, a survivor on page 0, or two positions on one private slot.
    """
    if not row.shape == keep.shape == private.shape or row.ndim != 1 or page_size < 1:
        raise ValueError(
            f"expected row, keep and private of one shape [length] and a page size of at least 1, got {list(row.shape)}, "
            f"{list(keep.shape)}, {list(private.shape)} and {page_size}"
        )
    pages, offsets = np.divmod(row, page_size)
    if (pages[keep] == 0).any():
        raise ValueError(f"expected survivors outside page 0, got position {np.flatnonzero(keep & (pages == 0))[0]}")
    # A page of which any slot is not private, by whichever position, is out of bounds as a whole.
    known = int(pages.max(initial=0)) + 1
    out_of_bounds = np.zeros(known, np.bool_)
    out_of_bounds[pages[~private]] = True
    out_of_bounds[0] = True
    mine = np.flatnonzero(private & ~out_of_bounds[pages])
    is_own = np.zeros(known, np.bool_)
    is_own[pages[mine]] = True
    own = np.flatnonzero(is_own)

    # From here on pages are numbered 0, 1, ... so that all arrays are as long as the request, not as the pool.
    number = np.zeros(known, np.int64)
    number[own] = np.arange(len(own))
    page = number[pages[mine]]
    slot = page * page_size + offsets[mine]
    if np.bincount(slot, minlength=1).max() > 1:
        raise ValueError("expected every private slot at one position, got one that stands twice in the row")
    taken = np.zeros(len(own) * page_size, np.bool_)
    taken[slot[keep[mine]]] = True
    survivors = taken.reshape(len(own), page_size).sum(axis=1)
    latest = np.zeros(len(own), np.int64)
    latest[page] = mine  # ascending, so the last position of a page is what stays
    packed = survivors == page_size
    partial = np.flatnonzero((survivors > 0) & ~packed)
    needed = -(-int(survivors[partial].sum()) // page_size)
    packed[partial[np.lexsort((latest[partial], survivors[partial]))[len(partial) - needed :]]] = True

    leaving = mine[keep[mine] & ~packed[page]]
    empty = np.flatnonzero(np.repeat(packed, page_size) & ~taken)[: len(leaving)]
    return CompactionPlan(
        positions=leaving,
        sources=row[leaving],
        destinations=own[empty // page_size] * page_size + empty % page_size,
        freed=own[~packed],
    )


@dataclass(frozen=True)
class Packing:
    """Whole pages of entries, packed into as few as hold the survivors. All arrays index the entries, on the host.

    Attributes:
        sources, destinations: `[n]` int64 each, what to copy, as of `CompactionPlan`.
        places: `[m]` int64 ascending, the entries of the pages that are kept.
        holds: `[m]` int64, which entry's content each of them holds after the copies; -1 for none, at less than a page.
        freed: `[f]` int64 ascending, the entries of all other pages.
    """

    sources: NDArray[np.int64]
    destinations: NDArray[np.int64]
    places: NDArray[np.int64]
    holds: NDArray[np.int64]
    freed: NDArray[np.int64]


def pack_pages(keep: NDArray[np.bool_], page_size: int) -> Packing:
    """Pack entries that one request owns, page after page, whatever slots they are in.

    Args:
        keep: `[length]` bool, entries that survive; whole pages.
        page_size: entries a page.

    Raises:
        ValueError: part of a page.
    """
    if len(keep) % page_size:
        raise ValueError(f"expected whole pages of {page_size} entries, got {len(keep)}")
    entries = np.arange(len(keep))
    plan = plan_compaction(entries + page_size, keep, np.ones(len(keep), np.bool_), page_size)
    freed = np.isin(entries // page_size + 1, plan.freed)
    holds = np.where(keep, entries, -1)
    holds[plan.destinations - page_size] = plan.positions
    places = np.flatnonzero(~freed)
    return Packing(plan.positions, plan.destinations - page_size, places, holds[places], np.flatnonzero(freed))
