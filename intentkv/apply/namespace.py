"""Namespaces: private key spaces of the radix tree in which a pruned session's surviving tokens wait for its next turn.

A row that has holes lies on more than one path of the tree. Its beginning is shared under the text's own key; what
comes behind a hole is private, because its KV was computed without the dropped tokens:

    text      | system prompt | first turns ........ | x x x | kept | x x | kept | new tokens |
    segment   |-------------- own key ---------------|----------- "intentkv:7" ---------------|
                                                     ^ first hole: nobody else may read on from here

The tree files whole pages. A private path is a sequence of pages in any order: its key says, slot by slot, which
position of the text is there, so survivors that were packed together (see `apply.compaction`) need not be in order.
"""

from __future__ import annotations

from array import array
from dataclasses import dataclass, replace
from typing import Final

import numpy as np

from intentkv.apply.rows import NO_POSITIONS, below, page_ceil

PADDING: Final = 0  # key of an entry that holds no token of the text: it fills up a page
DROPPED: Final = 0xFFFFFFFF  # in a key in place of the token: a dropped one, whose entry the layout "mask" keeps
UNREAD: Final = -1  # stands for the position of an entry that a text does not read


@dataclass(frozen=True)
class Segment:
    """One path of the radix tree, as far as a session's text lies on it.

    Attributes:
        name: the path's private key space; None for the text's own key, which starts at 0 and which anybody may match.
        end: the text reads positions below it; those from it on belong to a text that went another way.
        ids: `[n]` int64, key of a private path, entry by entry, whole pages (see `entry_ids`); empty for the own key.
        behind: `[n]` int64, all holes the row had when the path last grew. KV computed behind other holes must not be
            appended: a parallel request that reads on would inherit holes it does not have.
    """

    name: str | None
    end: int
    ids: np.ndarray
    behind: np.ndarray

    @staticmethod
    def of_text(end: int) -> Segment:
        """The segment of a hole-free text, under its own key."""
        return Segment(None, end, NO_POSITIONS, NO_POSITIONS)

    def positions(self) -> np.ndarray:
        """Position of each entry of the path, in path order, `[n]` int64; UNREAD where the text reads none."""
        if self.name is None:
            return np.arange(self.end)
        named = (self.ids >> 32) - 1
        return np.where(named < self.end, named, UNREAD)

    def cut(self, end: int, page_size: int) -> Segment:
        """The same path for a text that agrees up to position `end` only: to the page of the last entry that it reads."""
        if self.name is None:
            return Segment.of_text(min(end, self.end))
        end = min(end, self.end)
        read = np.flatnonzero(replace(self, end=end).positions() != UNREAD)
        length = page_ceil(int(read[-1]) + 1, page_size) if len(read) else 0
        return replace(self, end=end, ids=self.ids[:length], behind=below(self.behind, end))

    def held(self, entries: int, end: int) -> Segment:
        """The first `entries` of a private path, read up to position `end`."""
        end = min(end, self.end)
        return replace(self, end=end, ids=self.ids[:entries], behind=below(self.behind, end))

    def grown(self, end: int, ids: np.ndarray) -> Segment:
        """The path with `ids` behind it, for a text that it admits."""
        return replace(self, end=end, ids=np.concatenate((self.ids, ids)))

    def admits(self, holes: np.ndarray) -> bool:
        """Whether tokens computed behind `holes` may be appended to this path, and the text reads all that is on it."""
        return np.array_equal(self.behind, holes) and bool(((self.ids >> 32) <= self.end).all())

    def key(self) -> array[int]:
        """`ids` as the tree takes them."""
        return array("q", self.ids.tobytes())


def entry_ids(positions: np.ndarray, tokens: np.ndarray, holes: np.ndarray = NO_POSITIONS) -> np.ndarray:
    """Key of a namespace path, `[n]` int64: position and token in one number each; PADDING at UNREAD positions.

    A key tells all holes that its entries were computed behind: positions that are not there, or are there as DROPPED. Without that, a
    row that leaves the path before a hole and computes the same text without it would be handed what was computed behind it.

    Token ids alone collide: a branch whose next tokens equal those *after* a hole would be handed KV of other
    positions. The position is counted from 1, so that no key of plain token ids, whatever its `extra_key`, can ever
    match a page that holds a token.

    Args:
        positions: `[n]` int64.
        tokens: `[length]` integers, the session's text, indexed by position.
        holes: `[h]` int64, dropped positions; those among `positions` are entries of the layout "mask".
    """
    named = np.where(np.isin(positions, holes), DROPPED, tokens[positions].astype(np.int64) & 0xFFFFFFFF)
    ids = (positions + 1) << 32 | named
    return np.where(positions == UNREAD, PADDING, ids)


class NamespaceNames:
    """Hands out names of key spaces, each used once. A counter, so that all ranks choose the same name."""

    def __init__(self) -> None:
        self._used = 0

    def fresh(self) -> str:
        self._used += 1
        return f"intentkv:{self._used}"
