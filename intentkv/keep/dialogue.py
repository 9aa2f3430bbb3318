"""What user and assistant said to each other: a small part of an agent's context, and what its next answer goes on from."""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

SHARE = 3  # a third of the budget at most: beyond that, the dialogue would crowd out what it is about


def newest_that_fit(said: Sequence[tuple[int, int]], positions: NDArray[np.int64], budget: int) -> NDArray[np.bool_]:
    """Which candidates belong to the newest messages that fit, as wholes, into a third of the budget; `[n]` bool.

    A message that does not fit is passed over. What is no longer live of a message costs nothing.

    Args:
        said: `[start, end)` of each message, in order.
        positions: `[n]` int64 ascending, logical positions of the candidates.
        budget: tokens of history that an event keeps.
    """
    room = budget // SHARE
    chosen = np.zeros(len(positions), np.bool_)
    for bounds in reversed(said):
        first, last = np.searchsorted(positions, bounds)
        if last - first <= room:
            chosen[first:last] = True
            room -= int(last - first)
    return chosen
