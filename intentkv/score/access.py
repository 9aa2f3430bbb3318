"""Action access vectors: in which of the action regions that could see it an entry was a hit (ActKV, section 5.1)."""

from collections.abc import Sequence
from typing import Final, Literal

import numpy as np
from numpy.typing import NDArray

AccessClass = Literal["cold_start", "intermittent", "continuous"]
CLASSES: Final[tuple[AccessClass, ...]] = ("cold_start", "intermittent", "continuous")

# What an entry has been through, as an automaton: the class of a vector needs no more than its last state.
_NEW, _ZEROS, _LATE, _RUN, _RUN_OVER, _AGAIN = range(6)
_NEXT: Final = np.array(  # [state, hit]
    [[_ZEROS, _RUN], [_ZEROS, _LATE], [_LATE, _LATE], [_RUN_OVER, _RUN], [_RUN_OVER, _AGAIN], [_AGAIN, _AGAIN]],
    dtype=np.uint8,
)
_CLASS: Final[dict[int, AccessClass]] = {
    _LATE: "cold_start",
    _RUN: "continuous",
    _RUN_OVER: "continuous",
    _AGAIN: "intermittent",
}


def access_class(vector: Sequence[bool]) -> AccessClass | None:
    """The class of one access vector, oldest region first; None if it has no one, for such entries are set aside.

    Cold-start begins with a zero; of the rest, intermittent has a zero between its first and its last one, and
    continuous has none.
    """
    state = _NEW
    for hit in vector:
        state = int(_NEXT[state, int(hit)])
    return _CLASS.get(state)


class AccessClasses:
    """The classes of all entries of one text, kept up to date in one byte an entry."""

    def __init__(self) -> None:
        self._states = np.zeros(0, dtype=np.uint8)

    def add(self, visible: NDArray[np.int64], hits: NDArray[np.bool_]) -> None:
        """One more region. `visible`: `[n]` int64 ascending, positions it could see; `hits`: `[n]` bool, beside them."""
        if len(visible):
            self._states = np.pad(self._states, (0, max(0, int(visible[-1]) + 1 - len(self._states))))
            self._states[visible] = _NEXT[self._states[visible], hits.astype(np.int64)]

    def counts(self) -> dict[AccessClass, int]:
        """Entries of each class; those never hit are set aside."""
        found = np.bincount(self._states, minlength=len(_NEXT))
        return {name: int(sum(found[state] for state, of in _CLASS.items() if of == name)) for name in CLASSES}

    def of(self, position: int) -> AccessClass | None:
        """The class of the entry at `position`, None if it was never hit."""
        return _CLASS.get(int(self._states[position])) if position < len(self._states) else None

    def beginning(self, length: int) -> "AccessClasses":
        """A copy of the first `length` positions."""
        copy = AccessClasses()
        copy._states = self._states[:length].copy()
        return copy
