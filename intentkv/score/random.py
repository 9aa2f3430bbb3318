"""Random scores: the baseline that any other scorer has to beat."""

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from intentkv.score.base import Need, ScoreInput


class RandomScorer:
    """A score in [0, 1) that depends on the seed and the logical position only.

    Equal on all ranks, and the same on every turn: what survived one event is not drawn anew at the next.
    """

    name = "random"
    needs: frozenset[Need] = frozenset()

    def score(self, x: ScoreInput) -> Tensor:
        """`[n]` float32 on the device of `x.slots`."""
        return draw(x.seed, x.positions).to(x.slots.device)


def draw(seed: int, numbers: Tensor) -> Tensor:
    """`[n]` float32 in [0, 1), on the CPU: what `seed` draws for each of `numbers`, `[n]` int64 on the CPU."""
    # Seed and number are mixed one after the other: their sum would make neighbouring seeds shifts of each other.
    bits = _mix(numbers.numpy().astype(np.uint64) ^ _mix(np.full(1, np.uint64(seed % 2**64))))
    return torch.from_numpy((bits >> np.uint64(40)).astype(np.float32) / np.float32(2**24))


def _mix(values: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """The splitmix64 finaliser (Steele, Lea and Flood, 2014) of `[n]` uint64."""
    mixed = values + np.uint64(0x9E3779B97F4A7C15)  # wraps, as it should
    mixed = (mixed ^ (mixed >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return mixed ^ (mixed >> np.uint64(31))
