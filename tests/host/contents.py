"""The stand-in for keys and values: every slot holds what its token's KV would depend on.

That is its text up to the token, and the holes it was computed behind. A row that reads an overwritten slot, another
session's slot, or KV computed behind holes it does not have, is seen at once.
"""

from collections.abc import Iterable

import numpy as np

from intentkv.apply.rows import NO_POSITIONS


def text_hashes(tokens: Iterable[int]) -> np.ndarray:
    """One number for each beginning of a text, `[length]` uint64."""
    ids = np.array(tokens, dtype=np.uint64) + np.uint64(1)
    weights = np.cumprod(np.full(len(ids), 0x9E3779B97F4A7C15, dtype=np.uint64))
    return np.cumsum(ids * weights, dtype=np.uint64)


class Contents:
    """What the slots of one pool hold."""

    def __init__(self, slots: int) -> None:
        self._text = np.zeros(slots, dtype=np.uint64)
        self._behind = np.zeros(slots, dtype=np.int64)  # index into the sets of holes
        self._hole_sets: list[np.ndarray] = [NO_POSITIONS]

    def write(self, slots: np.ndarray, tokens: Iterable[int], start: int, holes: np.ndarray) -> None:
        """Compute the positions of a text from `start` on into `slots`, in a row with `holes`."""
        self._text[slots] = text_hashes(tokens)[start:]
        if len(holes) and not np.array_equal(self._hole_sets[-1], holes):
            self._hole_sets.append(holes)
        self._behind[slots] = len(self._hole_sets) - 1 if len(holes) else 0

    def move(self, sources: np.ndarray, destinations: np.ndarray) -> None:
        """Copy slots as one kernel does: in any order, so that no slot may be read after it was written."""
        assert not np.isin(sources, destinations).any() and len(np.unique(destinations)) == len(destinations)
        for what in (self._text, self._behind):
            what[destinations] = what[sources]

    def check(self, slots: np.ndarray, tokens: Iterable[int], positions: np.ndarray, holes: np.ndarray) -> None:
        """`slots` hold KV of `positions` of this text, computed behind no hole but `holes`."""
        wrong = self._text[slots] != text_hashes(tokens)[positions]
        assert not wrong.any(), f"position {positions[wrong][0]} reads KV of another text"
        for index in np.unique(self._behind[slots]):
            foreign = np.setdiff1d(self._hole_sets[index], holes)
            assert not len(foreign), f"KV computed behind a hole at {foreign[0]} is read by a row without it"
