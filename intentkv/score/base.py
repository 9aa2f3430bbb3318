"""What a scorer is given and what it must return."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor


@dataclass(frozen=True)
class ScoreInput:
    """The live history of one request at one event. n candidates, L layers, H_q query heads, head dimension D.

    Under tensor parallelism the heads are this rank's; the caller sums the scores over the ranks.

    Attributes:
        layer_keys: layer -> paged keys `[S, H_kv, D]` of any float dtype, rotated (post-RoPE), on the pool's device.
            A view of the pool: never written to.
        slots: `[n]` int64, row of each candidate in the paged keys.
        positions: `[n]` int64 on the CPU, logical position of each candidate, ascending.
        memory: `[L, H_q, D]` float32, the session's query memory M_t.
        query: `[L, H_q, D]` float32, this turn's Enc(q_t).
        seed: equal on all ranks and over all turns of a session.
        num_layers: L.
        query_slots: `[q]` int64, rows in the paged keys of the tokens that `query` is the mean of, in order. May
            be empty.
    """

    layer_keys: Callable[[int], Tensor]
    slots: Tensor
    positions: Tensor
    memory: Tensor
    query: Tensor
    seed: int
    num_layers: int
    query_slots: Tensor = field(default_factory=lambda: torch.empty(0, dtype=torch.int64))


class Scorer(Protocol):
    """Ranks history tokens. One file a scorer; add it to `intentkv.score.registry.SCORERS` under its name."""

    @property
    def name(self) -> str:
        """The name users select it by."""
        ...

    def score(self, x: ScoreInput) -> Tensor:
        """Score every candidate: `[n]` float32 on the device of `x.slots`; higher = keep.

        Changes nothing in `x`, and waits for no device. n may be 0.
        """
        ...
