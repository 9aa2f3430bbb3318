"""observe, once a scorer has asked for it: how surprising each token was to the model when it came.

One number a slot, so that it travels with KV that is shared, kept over turns, or filed in a namespace. Whoever computes a
token writes its number, so that nothing of a slot's earlier owner is ever read. Once any request has asked, that is so for
sessions with other scorers too: what one session keeps of a shared text must not depend on the scorer of another that
computed it first. Only a request that opted out, which is served as by stock SGLang, writes 0.

The row before a token predicts it. Inside a forward both are at hand. The prediction of a forward's last row is kept by the
row of the request until the token behind it is computed: that is the next chunk's first token, or the one that was sampled.
Only the first token behind a prefix found in the cache stays unknown. A retracted request keeps its numbers, since it
computes again from some place behind which a token would be unknown that was not, and would then keep something else.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from intentkv.engine.state import RequestState
from intentkv.kernels.surprise import logit_surprise, shard_logits, surprise_of
from intentkv.score.ranks import ALONE, Ranks


@dataclass(frozen=True)
class _Asking:
    """A session's request in the running forward: its place in the batch, its row of `req_to_token`, its first tensor row."""

    state: RequestState
    index: int
    row: int
    first: int
    begin: int
    end: int

    @property
    def next_known(self) -> bool:
        """Whether the token behind this forward is one of the prompt."""
        return self.end < min(self.state.goal, self.state.prompt_tokens)


@dataclass(frozen=True)
class Shard:
    """The part of the LM head that this rank has: `weight` `[v, E]`, of tokens `[first, first + v)`."""

    weight: Tensor
    first: int

    @classmethod
    def of(cls, lm_head: Any) -> Shard:
        """Of a model's `lm_head`, without the rows that fill a shard up."""
        shard = getattr(lm_head, "shard_indices", None)
        if shard is None:  # a head that is not split
            return cls(lm_head.weight, 0)
        return cls(lm_head.weight[: shard.num_org_elements], shard.org_vocab_start_index)


class SurpriseObserver:
    """Surprise by slot; one of the sampling observers (see `engine.sampling`).

    Attributes:
        by_slot: `[S]` float32 on the pool's device, nats.
    """

    def __init__(self, slots: int, rows: int, device: torch.device, ranks: Ranks = ALONE) -> None:
        self.by_slot = torch.zeros(slots, dtype=torch.float32, device=device)
        self._ahead = torch.zeros(
            rows, dtype=torch.float32, device=device
        )  # of the token behind each row's computed end
        self._ranks = ranks
        self._asking: list[_Asking] = []
        self._sampled: list[_Asking] = []

    def begin(self, forward_batch: Any, states: Mapping[str, RequestState], spans: list[tuple[str, int, int]]) -> None:
        """Before a forward: the tokens that it computes are unknown so far, but for those that were predicted.

        Args:
            spans: of each request of the batch: its id, and the positions `[begin, end)` that this forward computes.
        """
        self._asking, self._sampled = [], []
        slots = forward_batch.out_cache_loc
        if slots is None:
            return
        self.by_slot.index_fill_(0, slots.long(), 0.0)
        first = 0
        for index, (rid, begin, end) in enumerate(spans):
            state = states.get(rid)
            if state is not None:
                asking = _Asking(state, index, int(forward_batch.intentkv_rows[index]), first, begin, end)
                self._asking.append(asking)
            first += end - begin
        carried = [a for a in self._asking if a.state.predicted == a.begin]
        if carried:
            device = slots.device
            at = _indices([a.first for a in carried], device)
            self.by_slot[slots[at].long()] = self._ahead[_indices([a.row for a in carried], device)]
        for a in self._asking:
            a.state.predicted = a.end if a.next_known or a.end >= a.state.goal else -1
        self._sampled = [a for a in self._asking if a.end >= a.state.goal]

    def observe(self, hidden: Tensor, ids: Tensor, slots: Tensor, head: Shard, scale: float) -> None:
        """After a prefill's layers: measure what its rows have predicted.

        Args:
            hidden: `[T, E]`. ids, slots: `[T]`, token and slot of each row. head: this rank's. scale: factor on the logits.
        """
        inside = [torch.arange(a.first, a.first + a.end - a.begin - 1) for a in self._asking]
        known = [a for a in self._asking if a.next_known]
        if not inside:
            return
        device = hidden.device
        within = torch.cat(inside).to(device, non_blocking=True)
        last = _indices([a.first + a.end - a.begin - 1 for a in known], device)
        coming = _indices([int(a.state.prompt[a.end]) for a in known], device)
        targets = torch.cat((ids[within + 1].long(), coming))
        values = self._surprise(hidden[torch.cat((within, last))], targets, head, scale)
        self.by_slot[slots[within + 1].long()] = values[: len(within)]
        self._ahead[_indices([a.row for a in known], device)] = values[len(within) :]
        for a in self._asking:
            if a.state.measured is not None:
                again = a.state.measured[a.begin : a.end]
                self.by_slot[slots[a.first : a.first + len(again)].long()] = again

    def keep(self, state: RequestState, slots: Tensor, row: int) -> None:
        """A request gives back its row unfinished: what is known of its tokens waits in its state.

        Args:
            slots: `[n]`, of the tokens computed so far. row: of `req_to_token`.
        """
        known = self.by_slot[slots.long()]
        if state.predicted == len(slots):
            known = torch.cat((known, self._ahead[row : row + 1]))
        if state.measured is not None:
            known = torch.cat((known, state.measured[len(known) :]))
        state.measured = known

    def _surprise(self, hidden: Tensor, targets: Tensor, head: Shard, scale: float) -> Tensor:
        """`[T]` float32. Every rank says what its part of the vocabulary comes to; one sum brings all of it together."""
        said = torch.zeros(self._ranks.size + 1, len(targets), dtype=torch.float32, device=hidden.device)
        said[self._ranks.rank], said[-1] = shard_logits(hidden, targets, head.weight, scale, head.first)
        said = self._ranks.sum(said)
        return surprise_of(said[:-1].logsumexp(0), said[-1], targets)

    # -- SGLang's sampling observer

    def is_active(self, sampling_info: Any) -> bool:
        return bool(self._sampled)

    def before_grammar(self, logits: Tensor, sampling_info: Any) -> tuple[Tensor, Tensor, Tensor]:
        """Copies of the rows that are wanted of `logits` `[B, V]`, which the sampler overwrites."""
        chosen = _indices([a.index for a in self._sampled], logits.device)
        return chosen, _indices([a.row for a in self._sampled], logits.device), logits[chosen]

    def after_sample(self, state: tuple[Tensor, Tensor, Tensor], token_ids: Tensor) -> None:
        """Note how surprising the sampled tokens `[B]` are; they are computed, and get a slot, in the next forward."""
        chosen, rows, logits = state
        self._ahead[rows] = logit_surprise(logits, token_ids[chosen].long())


def _indices(values: list[int], device: torch.device) -> Tensor:
    return torch.tensor(values, dtype=torch.int64).to(device, non_blocking=True)


def lm_head_problem(model: Any) -> str | None:
    """Why the surprise of this model's tokens cannot be had; None if it can."""
    weight = getattr(getattr(model, "lm_head", None), "weight", None)
    if isinstance(weight, Tensor) and weight.is_floating_point():
        return None
    found = "none" if weight is None else str(getattr(weight, "dtype", type(weight).__name__))
    return (
        f'expected a model with a floating-point weight at lm_head, got {found}: choose a scorer that does not need "surprise", '
        "such as --intentkv-scorer intent-rule"
    )
