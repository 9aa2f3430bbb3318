"""Confidence of the tokens being sampled, for sessions whose budget follows it; no logprobs are asked for.

One of SGLang's extension points: a sampling observer sees the logits of every step before grammar and sampler, and what
it returns travels to the host in the copy that carries the sampled tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from intentkv.engine.state import RequestState
from intentkv.keep.auto_budget import AutoBudgets
from intentkv.observe.confidence import token_confidence
from intentkv.score.ranks import ALONE, Ranks


class ConfidenceObserver:
    """Installed as `ModelRunner.sampling_observer`; active only for batches in which somebody's budget is `auto`.

    Args:
        budgets: told every confidence.
        states: requests of ours by id.
        ranks: those that sample the same tokens, from the same logits; a budget may hang on a last bit.
    """

    def __init__(self, budgets: AutoBudgets, states: Mapping[str, RequestState], ranks: Ranks = ALONE) -> None:
        self._budgets, self._states, self._ranks = budgets, states, ranks
        self._rows: list[int] = []
        self.waiting = 0  # requests with a budget of auto that were ever opened; none: never look at a batch

    def expect(self, forward_batch: Any) -> None:
        """Before a forward: which rows of its logits are wanted."""
        self._rows = []
        if self.waiting and forward_batch.rids is not None:
            self._rows = [i for i, rid in enumerate(forward_batch.rids) if _follows(self._states.get(rid))]

    def is_active(self, sampling_info: Any) -> bool:
        return bool(self._rows)

    def before_grammar(self, logits: Tensor, sampling_info: Any) -> tuple[list[int], Tensor]:
        """`logits` `[B, V]`, before grammar masks and before the sampler turns them into probabilities in place."""
        rows = self._rows
        wanted = logits if len(rows) == len(logits) else logits[rows]
        return rows, self._ranks.first(token_confidence(wanted))

    def after_sample(self, state: tuple[list[int], Tensor], token_ids: Tensor) -> _OnDevice:
        return _OnDevice(self._budgets, *state)


@dataclass(frozen=True)
class _OnDevice:
    budgets: AutoBudgets
    rows: list[int]
    confidence: Tensor  # [len(rows)] float32

    def copy_to_host(self, copy_tensor: Callable[[Tensor], Tensor]) -> _OnHost:
        return _OnHost(self.budgets, self.rows, copy_tensor(self.confidence))


@dataclass(frozen=True)
class _OnHost:
    budgets: AutoBudgets
    rows: list[int]
    confidence: Tensor

    def consume(self, batch: Any, commits: Sequence[Any]) -> None:
        """Note the confidence of every token that was committed; a chunk's placeholder token is not."""
        for row, confidence in zip(self.rows, self.confidence.tolist(), strict=True):
            state = getattr(batch.reqs[row], "intentkv", None)
            if commits[row] is not None and state is not None and _follows(state):
                self.budgets.observe(state.session, confidence)


def _follows(state: RequestState | None) -> bool:
    return state is not None and state.budget.kind == "auto"
