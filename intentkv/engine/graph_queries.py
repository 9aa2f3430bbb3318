"""The queries of decode steps that a CUDA graph replays: no hook runs inside one.

While a decode graph is captured, every attention layer copies its queries into a buffer that was made before, so the copy
is part of the graph. After a replay the observers are handed the rows of that buffer, layer by layer, as an eager step hands
them those of the layers. It is made only where the server's scorer looks at decode steps, since every step pays for it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Final

import torch
from torch import Tensor

from intentkv.score.base import Need

DECODE_NEEDS: Final[frozenset[Need]] = frozenset({"window", "attention", "keep_scores"})  # those fed by decode steps


class GraphQueries:
    """One buffer a layer, whose address the graphs keep: `[size, H_q, D]` of `dtype`, so L * size * H_q * D elements.

    Args:
        layers: the model's attention layers.
        size: the most tokens that a captured step computes.
    """

    def __init__(self, layers: Sequence[Any], size: int, dtype: torch.dtype, device: torch.device | str) -> None:
        self._layers = {layer.layer_id: layer for layer in layers}
        self._rows = {
            layer.layer_id: torch.zeros(size, layer.tp_q_head_num, layer.qk_head_dim, dtype=dtype, device=device)
            for layer in layers
        }

    def record(self, layer: Any, queries: Tensor) -> None:
        """While `layer` is captured: copy its `queries`, `[T, H_q * D]` or `[T, H_q, D]`, at every replay to come."""
        rows = self._rows[layer.layer_id][: len(queries)]
        rows.copy_(queries.view(rows.shape))

    def replayed(self, tokens: int) -> Iterator[tuple[Any, Tensor]]:
        """After a replay: each layer with the queries `[tokens, H_q, D]` of the step's requests, padding left out. Views:
        the next replay writes over them, in the order of the stream."""
        for number, layer in self._layers.items():
            yield layer, self._rows[number][:tokens]
