"""What user and assistant said to each other: a small part of an agent's context, and what its next answer goes on from."""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

SHARE = 2 / 3


def room(budget: int, history: int) -> int:
    """Tokens that the dialogue may take before anything else: of the budget two thirds of the share that the budget is of the
    history, and a third at most.

    With half of the history kept that is a third of the budget, with an eighth a twelfth: the tighter it is, the less can be
    spared from what was talked about.

    Args:
        budget: tokens of history that an event keeps. history: tokens that it chooses from, dropped ones included.
    """
    return int(budget * min(1 / 3, SHARE * budget / max(1, history)))


def newest_that_fit(said: Sequence[tuple[int, int]], positions: NDArray[np.int64], tokens: int) -> NDArray[np.bool_]:
    """Which candidates belong to the newest messages that fit, as wholes, into `tokens`; `[n]` bool.

    A message that does not fit is passed over. What is no longer live of a message costs nothing.

    Args:
        said: `[start, end)` of each message, in order.
        positions: `[n]` int64 ascending, logical positions of the candidates.
    """
    chosen = np.zeros(len(positions), np.bool_)
    for bounds in reversed(said):
        first, last = np.searchsorted(positions, bounds)
        if last - first <= tokens:
            chosen[first:last] = True
            tokens -= int(last - first)
    return chosen
