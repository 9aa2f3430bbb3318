"""Namespaces: private key spaces of the radix tree in which a pruned session's surviving tokens wait for its next turn.

A row that has holes lies on more than one path of the tree. Its beginning is shared under the text's own key; what
comes behind a hole is private, because its KV was computed without the dropped tokens:

    text      | system prompt | first turns ........ | x x x | kept | x x | kept | new tokens |
    segment   |-------------- own key ---------------|----------- "intentkv:7" ---------------|
                                                     ^ first hole: nobody else may read on from here
"""

from __future__ import annotations

from array import array
from dataclasses import dataclass, replace

import numpy as np

from intentkv.apply.rows import NO_POSITIONS, below, live_positions


@dataclass(frozen=True)
class Segment:
    """Positions `[start, end)` of a session's text, on one path of the radix tree.

    Attributes:
        name: the path's private key space; None for the text's own key, which starts at 0 and which anybody may match.
        missing: `[n]` int64, positions without an entry on the path because their slots were given back.
        behind: `[n]` int64, all holes the row had when the path last grew. KV computed behind other holes must not be
            appended: a parallel request that reads on would inherit holes it does not have.
    """

    name: str | None
    start: int
    end: int
    missing: np.ndarray
    behind: np.ndarray

    @staticmethod
    def of_text(end: int) -> Segment:
        """The segment of a hole-free text, under its own key."""
        return Segment(None, 0, end, NO_POSITIONS, NO_POSITIONS)

    def positions(self) -> np.ndarray:
        """Positions that have an entry on the path, in path order, `[n]` int64."""
        return live_positions(self.start, self.end, self.missing)

    def cut(self, end: int) -> Segment:
        """The same path up to position `end`."""
        return replace(self, end=end, missing=below(self.missing, end), behind=below(self.behind, end))

    def admits(self, holes: np.ndarray) -> bool:
        """Whether tokens computed behind `holes` may be appended to this path."""
        return np.array_equal(self.behind, holes)


def entry_ids(positions: np.ndarray, tokens: np.ndarray) -> array[int]:
    """Keys of a namespace path: position and token in one int64 each.

    Token ids alone collide: a branch whose next tokens equal those *after* a hole would be handed KV of other
    positions. The position is counted from 1, so that no key of plain token ids, whatever its `extra_key`, can ever
    match an entry.

    Args:
        positions: `[n]` int64.
        tokens: `[length]` integers, the session's text, indexed by position.
    """
    ids = (positions + 1) << 32 | (tokens[positions].astype(np.int64) & 0xFFFFFFFF)
    return array("q", ids.tobytes())


class NamespaceNames:
    """Hands out names of key spaces, each used once. A counter, so that all ranks choose the same name."""

    def __init__(self) -> None:
        self._used = 0

    def fresh(self) -> str:
        self._used += 1
        return f"intentkv:{self._used}"
