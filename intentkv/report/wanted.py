"""What a later turn would have wanted back: text of its newest message or its answer that had been dropped.

Only literal overlap is seen, so it is a lower bound: a question in other words than the record goes unnoticed.
"""

from __future__ import annotations

from typing import Final

import numpy as np
from numpy.typing import NDArray

GRAM: Final = 4  # tokens in a row that must agree
COMMON: Final = 4  # a run of tokens seen more often than this in the history is phrasing, not content
_FACTORS: Final = np.array([0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB, 0xD6E8FEB86659FD93], np.uint64)


def wanted_positions(
    tokens: NDArray[np.int32],
    holes: NDArray[np.bool_],
    query: tuple[int, int],
    prompt: int,
    special: frozenset[int] = frozenset(),
) -> NDArray[np.bool_]:
    """`[L]` bool: dropped text before the newest message that the newest message or the answer repeats.

    A run of `GRAM` tokens counts if one of them is dropped, it stands nowhere in the history with all of them live, and
    it is no phrase that comes again and again.

    Args:
        tokens: `[L]`, prompt and answer. holes: `[L]`, what is dropped at the turn's end.
        query: span of the newest message. prompt: tokens of the prompt.
        special: token ids, such as message boundaries, that are no text; a run with one of them does not count.
    """
    found = np.zeros(len(tokens), np.bool_)
    grams = _grams(tokens)
    history = grams[: max(0, query[0] - GRAM + 1)]
    newest = np.concatenate([grams[query[0] : max(query[0], query[1] - GRAM + 1)], grams[prompt:]])
    if not len(history) or not len(newest):
        return found
    touched = _in_window(holes)[: len(history)]
    values, inverse, counts = np.unique(history, return_inverse=True, return_counts=True)
    live = np.zeros(len(values), np.bool_)
    live[inverse[~touched]] = True
    wanted = np.isin(values, newest) & ~live & (counts <= COMMON)
    text = ~_in_window(np.isin(tokens, list(special)))[: len(history)]
    for start in np.flatnonzero(wanted[inverse] & touched & text):
        found[start : start + GRAM] = True
    return found


def runs(mask: NDArray[np.bool_]) -> list[tuple[int, int]]:
    """`[start, end)` of each run of True."""
    edges = np.flatnonzero(np.diff(np.concatenate([[False], mask, [False]]).astype(np.int8)))
    return list(zip(edges[::2].tolist(), edges[1::2].tolist(), strict=True))


def _grams(tokens: NDArray[np.int32]) -> NDArray[np.uint64]:
    """A 64-bit number for each run of `GRAM` tokens, `[L - GRAM + 1]`."""
    n = max(0, len(tokens) - GRAM + 1)
    wide = tokens.astype(np.uint64) + np.uint64(1)
    mixed = np.zeros(n, np.uint64)
    for offset, factor in enumerate(_FACTORS):
        mixed += wide[offset : offset + n] * factor  # wraps, as it should
    return mixed


def _in_window(mask: NDArray[np.bool_]) -> NDArray[np.bool_]:
    """Whether one of the `GRAM` positions from here on is True, `[L - GRAM + 1]`."""
    sums = np.concatenate([[0], np.cumsum(mask)])
    return (sums[GRAM:] - sums[:-GRAM]) > 0 if len(mask) >= GRAM else np.zeros(0, np.bool_)
