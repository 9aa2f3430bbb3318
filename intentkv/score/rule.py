"""The rule score of IntentKV: attention that the session's query memory would pay to each history token."""

import math
from typing import Literal

import torch
from torch import Tensor

from intentkv.kernels.rule_score import add_rule_score
from intentkv.score.base import Need, ScoreInput, missing


class RuleScorer:
    """`rule_j = sum over l, h of softmax over j (M_t[l, h] . K[l, h, j] / (sqrt(D) T))` (IntentKV, rule score).

    M_t has unit norm, while real queries have a norm near sqrt(D); at T = 1, the published form, the softmax is
    therefore much flatter than the model's own attention. `rescaled`, T = 1 / sqrt(D), gives M_t that norm back.

    The keys are read in place, by a Triton kernel on a GPU and in chunks on a CPU (`intentkv.kernels.rule_score`); the
    workspace does not grow with n, only the result, the slots and the positions do.
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
        divisor = 1.0 if self._temperature == "rescaled" else self._temperature * math.sqrt(x.memory.shape[-1])
        queries = (x.memory / divisor).to(x.slots.device)
        total = torch.zeros(x.slots.shape, dtype=torch.float32, device=x.slots.device)
        for layer in range(x.num_layers):
            add_rule_score(queries[layer], x.layer_keys(layer), x.slots, total)
        return x.ranks.sum(total)
