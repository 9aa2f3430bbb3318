"""The rule score of IntentKV: attention that the session's query memory would pay to each history token."""

import math
from collections.abc import Iterator
from typing import Literal

import torch
from torch import Tensor

from intentkv.kernels.chunks import chunks
from intentkv.score.base import Need, ScoreInput, missing


class RuleScorer:
    """`rule_j = sum over l, h of softmax over j (M_t[l, h] . K[l, h, j] / (sqrt(D) T))` (IntentKV, rule score).

    M_t has unit norm, while real queries have a norm near sqrt(D); at T = 1, the published form, the softmax is
    therefore much flatter than the model's own attention. `rescaled`, T = 1 / sqrt(D), gives M_t that norm back.

    The keys are read in place, in chunks of positions whose temporaries together stay below `chunks.WORKSPACE_BYTES`,
    so that the workspace does not grow with n; only the result, the slots and the positions do. A history of one chunk
    is read once a layer, a longer one twice: first for the softmax's peak and mass, then for the shares. Query heads of
    a group share their KV head by a batched matrix product, without copies of the keys for each.
    """

    needs: frozenset[Need] = frozenset({"query"})

    def __init__(self, name: str, temperature: float | Literal["rescaled"]) -> None:
        """`temperature`: T > 0, or `rescaled`. Raises ValueError otherwise."""
        if temperature != "rescaled" and not 0 < temperature < math.inf:
            raise ValueError(f"{name}: expected a temperature above 0 or 'rescaled', got {temperature!r}")
        self.name = name
        self._temperature = temperature

    def score(self, x: ScoreInput) -> Tensor:
        """Score every candidate: `[n]` float32 on the device of `x.slots`, which is the keys'; each in [0, L * H_q].

        Raises ValueError without a memory, or if it does not fit the keys.
        """
        if x.memory is None:
            raise missing(self, "query")
        total = torch.zeros(x.slots.shape, dtype=torch.float32, device=x.slots.device)
        if x.slots.numel():
            for layer in range(x.num_layers):
                self._add_layer(total, x.layer_keys(layer), x.slots, x.memory[layer].to(total.device))
        return x.ranks.sum(total)

    def _add_layer(self, total: Tensor, keys: Tensor, slots: Tensor, memory: Tensor) -> None:
        """Add one layer's shares to `total` `[n]`. keys `[S, H_kv, D]`, memory `[H_q, D]`."""
        heads, head_dim = memory.shape
        kv_heads = keys.shape[1]
        if keys.shape[2] != head_dim or heads % kv_heads:
            raise ValueError(
                f"{self.name}: expected keys with D = {head_dim} and a number of KV heads that divides {heads}, "
                f"got {list(keys.shape)}"
            )
        divisor = 1.0 if self._temperature == "rescaled" else self._temperature * math.sqrt(head_dim)
        queries = (memory / divisor).view(kv_heads, heads // kv_heads, head_dim).transpose(1, 2)

        parts = list(_chunks(slots.numel(), heads, kv_heads, head_dim))
        peak = queries.new_full((kv_heads, 1, heads // kv_heads), -math.inf)
        mass = torch.zeros_like(peak)
        for chunk in parts:
            logits = _logits(queries, keys, slots[chunk])
            higher = torch.maximum(peak, logits.amax(1, keepdim=True))
            mass = mass * (peak - higher).exp() + (logits - higher).exp_().sum(1, keepdim=True)
            peak = higher
        for chunk in parts:
            if len(parts) > 1:
                logits = _logits(queries, keys, slots[chunk])
            total[chunk] += logits.sub_(peak).exp_().div_(mass).sum(dim=(0, 2))


def _logits(queries: Tensor, keys: Tensor, slots: Tensor) -> Tensor:
    """`[H_kv, c, G]` float32 from queries `[H_kv, D, G]` float32 and the keys of `slots` `[c]`."""
    gathered = keys.index_select(0, slots).to(torch.float32)
    # Keys first: with four or more queries first, the CPU's product sums each dot in one chain, at twice the error.
    return torch.bmm(gathered.transpose(0, 1), queries)


def _chunks(n: int, heads: int, kv_heads: int, head_dim: int) -> Iterator[slice]:
    """Slices of [0, n), each as long as the workspace allows."""
    # Alive at once for a position: its keys as stored (up to 4 bytes), in float32, and in the layout the product wants;
    # then the logits, their exponentials, and the logits of the chunk before.
    per_position = 4 * (3 * kv_heads * head_dim + 3 * heads)
    return chunks(n, per_position)
