"""Mean and covariance of the post-RoPE queries over the newest actionable span."""

from __future__ import annotations

import torch
from torch import Tensor

from intentkv.observe.query_mean import QueryMean


class QueryMoments(QueryMean):
    """A `QueryMean` that keeps the covariance too: H_q * D * D float32 a layer.

    Pieces are merged by their own means (Chan, Golub and LeVeque, 1983): sums of squares would cancel where the mean is
    large against the spread, which it is for queries.
    """

    def __init__(self) -> None:
        super().__init__()
        self._scatter: dict[int, Tensor] = {}

    def add(self, layer: int, queries: Tensor) -> None:
        """Add the rows `queries` `[rows, H_q, D]` (any dtype, any device) of one layer; keeps float32 sums."""
        rows = queries.to(torch.float32)
        mean = rows.mean(0)
        centred = (rows - mean).transpose(0, 1)
        scatter = centred.transpose(1, 2) @ centred
        if layer in self._scatter:
            before = self._rows[layer]
            step = mean - self._sums[layer] / before
            scatter += self._scatter[layer]
            scatter += step[:, :, None] * step[:, None, :] * (before * len(rows) / (before + len(rows)))
        self._scatter[layer] = scatter
        super().add(layer, queries)

    def covariance(self) -> Tensor:
        """Of all rows as they are, divided by their number: float32 `[L, H_q, D, D]`. Raises ValueError as `mean` does."""
        self.mean()
        return torch.stack([self._scatter[layer] / self._rows[layer] for layer in sorted(self._scatter)])
