"""observe, for scorers that ask for it: how surprising each prompt token was when it was computed.

One number a slot, so that it travels with KV that is shared, kept over turns, or filed in a namespace. Whoever computes a
token writes its number, and 0 unless its request asked for more, so that nothing of a slot's earlier owner is ever read.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from intentkv.kernels.surprise import token_surprise


class SurpriseObserver:
    """Surprise by slot.

    Attributes:
        by_slot: `[S]` float32 on the pool's device, nats.
    """

    def __init__(self, slots: int, device: torch.device) -> None:
        self.by_slot = torch.zeros(slots, dtype=torch.float32, device=device)

    def forget(self, slots: Tensor) -> None:
        """Before a forward: the tokens that it computes are unknown so far. `slots` is `[T]`, any integer type."""
        self.by_slot.index_fill_(0, slots.long(), 0.0)

    def observe(self, rows: Tensor, hidden: Tensor, ids: Tensor, slots: Tensor, head: Tensor, scale: float) -> None:
        """Write the surprise of the tokens behind `rows`, each of which the row before it has predicted.

        Args:
            rows: `[m]` int64, rows of this forward. hidden: `[T, E]`. ids, slots: `[T]`, token and slot of each row.
            head: `[V, E]`. scale: factor on the logits.
        """
        behind = rows + 1
        self.by_slot[slots[behind].long()] = token_surprise(hidden[rows], ids[behind].long(), head, scale)


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
