"""How much attention every token in the KV pool has received since it was computed (H2O, arXiv 2306.14048)."""

from __future__ import annotations

import torch
from torch import Tensor

from intentkv.kernels.attention_shares import attention_shares


class AttentionMass:
    """One float32 a slot of the pool, summed over layers, query heads and queries.

    It is kept by slot, so it travels with KV that later turns and other requests reuse: a slot is zeroed by whoever
    computes a token into it, and by nobody else. Attention paid by requests that do not observe it is not counted.

    Attributes:
        received: `[S]` float32 on the pool's device.
    """

    def __init__(self, slots: int, device: torch.device | str) -> None:
        self.received = torch.zeros(slots, dtype=torch.float32, device=device)

    def forget(self, slots: Tensor) -> None:
        """Zero `slots` `[n]` of any integer type: tokens are about to be computed into them. Must be called for every such token, of
        whichever request, before anything is added for it."""
        self.received.index_fill_(0, slots.long(), 0.0)

    def add(self, queries: Tensor, keys: Tensor, slots: Tensor, scale: float) -> None:
        """Add one layer's attention of a request's newest tokens.

        The temporaries stay below `chunks.WORKSPACE_BYTES`; keys are read twice where they do not fit at once.

        Args:
            queries: `[T, H_q, D]`, the queries of the last T of `slots`, in order.
            keys: `[S, H_kv, D]`, paged keys of the layer, those of the new tokens included.
            slots: `[m]` int64, all live positions of the request in order; m >= T.
            scale: factor on the logits in the model's own attention.
        """
        count = len(queries)
        visible = torch.arange(len(slots) - count + 1, len(slots) + 1)
        for _, chunk, shares in attention_shares(queries, keys, slots, visible, scale):
            self.received.index_add_(0, slots[chunk], shares.sum(dim=(0, 2, 3)))
