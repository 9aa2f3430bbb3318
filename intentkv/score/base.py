"""What a scorer is given and what it must return."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal, Protocol

import torch
from torch import Tensor

from intentkv.score.ranks import ALONE, Ranks

Need = Literal["query", "surprise", "window", "attention", "covariance", "values", "keep_scores", "dialogue", "words"]
"""What the engine collects only for requests whose scorer declares it; each is a field of `ScoreInput`."""

OF_QUERIES: frozenset[Need] = frozenset({"query", "covariance", "window", "attention", "keep_scores"})
"""Needs that are met by watching a request's own tokens as they are computed: a token that is found tells nothing."""


@dataclass(frozen=True)
class Window:
    """The newest queries of a request, and what they can see. W rows, m live positions.

    Attributes:
        queries: `[L, W, H_q, D]` in the model's dtype, rotated (post-RoPE): the last W rows that the request has computed
            since its prefix was found in the cache; W is 32, or fewer where it has computed fewer.
        start: logical position of the first row; the others follow it without a gap.
        slots: `[m]` int64, row of every live position in the paged keys, forced ones included.
        positions: `[m]` int64 on the CPU, their logical positions, ascending.
        scale: factor on the logits in the model's own attention.
    """

    queries: Tensor
    start: int
    slots: Tensor
    positions: Tensor
    scale: float

    @property
    def before(self) -> int:
        """How many live positions precede the window."""
        return int(torch.searchsorted(self.positions, self.start))

    @property
    def visible(self) -> Tensor:
        """`[W]` int64 on the CPU: how many of `slots` each row sees, its own included."""
        rows = torch.arange(self.start, self.start + self.queries.shape[1])
        return torch.searchsorted(self.positions, rows, right=True)

    def at(self, positions: Tensor, before: Tensor) -> Tensor:
        """Pick from `before`, `[self.before]` scores of what precedes the window, those of live `positions` `[n]`.

        Positions in the window score infinity: they are what the window's methods always keep.
        """
        inside = before.new_full((len(self.positions) - len(before),), torch.inf)
        index = torch.searchsorted(self.positions, positions)
        return torch.cat((before, inside))[index.to(before.device)]


@dataclass(frozen=True)
class ScoreInput:
    """The live history of one request at one event. n candidates, L layers, H_q query heads, head dimension D.

    Under tensor parallelism the heads of keys, values, queries, `covariance` and `attention` are this rank's, and a scorer
    adds up what it sums over heads by `ranks`; all else is equal on all ranks. The caller then takes the first rank's scores.

    Attributes:
        layer_keys: layer -> paged keys `[S, H_kv, D]` of any float dtype, rotated (post-RoPE), on the pool's device.
            A view of the pool: never written to.
        slots: `[n]` int64, row of each candidate in the paged keys.
        positions: `[n]` int64 on the CPU, logical position of each candidate, ascending.
        memory, query: for scorers that need "query": `[L, H_q, D]` float32, the session's query memory M_t, and this
            turn's Enc(q_t).
        seed: equal over all turns of a session.
        num_layers: L.
        query_slots: `[q]` int64, rows in the paged keys of the tokens that `query` is the mean of, in order. May
            be empty.
        share: of the history, dropped tokens included, that this event's budget keeps; in (0, 1].
        segments: `[n]` int64 on the CPU, ascending: the sentence, line or record each candidate belongs to (see
            `intentkv.observe.segments`). Forced and dropped tokens have numbers too, so some may be missing.
        surprise: for scorers that need "surprise": `[n]` float32, -log p of each candidate under the model itself when it was
            computed, in nats. 0 where that is not known: the first token behind a prefix found in the cache, and what was
            computed by a request that opted out or before any scorer had asked.
        window: for scorers that need "window": the newest queries.
        attention: for scorers that need "attention": `[n]` float32, the attention that each candidate has received since it
            was computed, summed over layers, heads and queries.
        covariance: for scorers that need "covariance": `[L, H_q, D, D]` float32, of the queries whose mean is `query`.
        layer_values: for scorers that need "values": as `layer_keys`, the paged values `[S, H_kv, D]`.
        keep_scores: for scorers that need "keep_scores": `[n]` float32 on the CPU, LRFU keep scores of the session's actions.
        dialogue: for scorers that need "dialogue": `[n]` bool on the CPU, candidates in the newest messages of user and
            assistant, as many as `intentkv.keep.dialogue` finds room for.
        words: for scorers that need "words": `[n]` int64 on the CPU, ascending: the word each candidate belongs to; a word is in
            one segment.
        ranks: those that have the other heads.
    """

    layer_keys: Callable[[int], Tensor]
    slots: Tensor
    positions: Tensor
    seed: int
    num_layers: int
    share: float
    segments: Tensor
    memory: Tensor | None = None
    query: Tensor | None = None
    query_slots: Tensor = field(default_factory=lambda: torch.empty(0, dtype=torch.int64))
    surprise: Tensor | None = None
    window: Window | None = None
    attention: Tensor | None = None
    covariance: Tensor | None = None
    layer_values: Callable[[int], Tensor] | None = None
    keep_scores: Tensor | None = None
    dialogue: Tensor | None = None
    words: Tensor | None = None
    ranks: Ranks = ALONE


class Scorer(Protocol):
    """Ranks history tokens. One file a scorer; add it to `intentkv.score.registry.SCORERS` under its name."""

    @property
    def name(self) -> str:
        """The name users select it by."""
        ...

    @property
    def needs(self) -> frozenset[Need]:
        """What the engine must collect for it, at a cost that requests with other scorers do not pay."""
        ...

    def score(self, x: ScoreInput) -> Tensor:
        """Score every candidate: `[n]` float32 on the device of `x.slots`; higher = keep.

        Changes nothing in `x`, and waits for no device. n may be 0.
        """
        ...


def missing(scorer: Scorer, need: Need) -> ValueError:
    """The error of a scorer that was given no `need`."""
    return ValueError(
        f"{scorer.name}: expected {need!r} in its input; the engine collects it for scorers that name it in `needs`"
    )
