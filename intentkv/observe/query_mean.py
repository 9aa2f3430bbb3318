"""Enc(q_t): the mean of the post-RoPE queries over the newest actionable span."""

from __future__ import annotations

import torch
from torch import Tensor


class QueryMean:
    """Running mean over query rows, for all layers; fed one layer and one piece of the span at a time."""

    def __init__(self) -> None:
        self._sums: dict[int, Tensor] = {}
        self._rows: dict[int, int] = {}

    def add(self, layer: int, queries: Tensor) -> None:
        """Add the rows `queries` [rows, H_q, D] (any dtype, any device) of one layer; keeps a float32 sum."""
        total = queries.float().sum(dim=0)
        self._sums[layer] = self._sums[layer] + total if layer in self._sums else total
        self._rows[layer] = self._rows.get(layer, 0) + queries.shape[0]

    def __bool__(self) -> bool:
        return bool(self._sums)

    def mean(self) -> Tensor:
        """Enc(q_t), float32 [L, H_q, D] (IntentKV, QueryMemory).

        Raises:
            ValueError: nothing was observed, or some layers saw other rows than others.
        """
        if not self._sums:
            raise ValueError("no query was observed: expected at least one row of every layer")
        if len(set(self._rows.values())) != 1 or sorted(self._sums) != list(range(len(self._sums))):
            raise ValueError(f"layers saw different query rows: {self._rows}; every layer must be fed the same rows")
        return torch.stack([self._sums[layer] / self._rows[layer] for layer in sorted(self._sums)])
