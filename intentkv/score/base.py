"""What a scorer is given and what it must return."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, Protocol

from torch import Tensor

Need = Literal["surprise"]  # what is observed only for scorers that ask for it


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
        segments: `[n]` int64 on the CPU, ascending: the sentence, line or record each candidate belongs to (see
            `intentkv.observe.segments`). Forced and dropped tokens have numbers too, so some may be missing.
        surprise: `[n]` float32, -log p of each candidate under the model itself when it was computed, in nats. 0 where that
            is not known: tokens that the model generated itself, the first of each chunk, and those of requests whose scorer
            does not ask for it. None unless the scorer needs "surprise".
    """

    layer_keys: Callable[[int], Tensor]
    slots: Tensor
    positions: Tensor
    memory: Tensor
    query: Tensor
    seed: int
    num_layers: int
    segments: Tensor
    surprise: Tensor | None = None


class Scorer(Protocol):
    """Ranks history tokens. One file a scorer; add it to `intentkv.score.registry.SCORERS` under its name."""

    @property
    def name(self) -> str:
        """The name users select it by."""
        ...

    @property
    def needs(self) -> frozenset[Need]:
        """What must be observed for it beside queries and keys."""
        ...

    def score(self, x: ScoreInput) -> Tensor:
        """Score every candidate: `[n]` float32 on the device of `x.slots`; higher = keep.

        Changes nothing in `x`, and waits for no device. n may be 0.
        """
        ...
