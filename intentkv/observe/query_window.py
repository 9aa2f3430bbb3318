"""The newest query rows of a request, for scorers that look at what a few last queries attend to."""

from __future__ import annotations

import torch
from torch import Tensor

WINDOW_ROWS = 32  # W of SnapKV (arXiv 2404.14469)


class QueryWindow:
    """The last W post-RoPE rows of every layer, for consecutive positions; fed one layer and one forward at a time.

    The rows of a layer are copied: W * H_q * D elements, in the dtype they come in.

    Attributes:
        end: logical position behind the last row.
    """

    def __init__(self) -> None:
        self.end = 0
        self._rows: dict[int, Tensor] = {}

    def begin(self, row: int, start: int, end: int) -> None:
        """The rows that come next are those of positions `[start, end)`; older ones stay if these go on where they ended."""
        if start != self.end:
            self._rows.clear()
        self.end = end

    def add(self, layer: int, queries: Tensor) -> None:
        """Add all rows `queries` `[end - start, H_q, D]` of one layer."""
        newest = queries[-WINDOW_ROWS:]
        kept = self._rows.get(layer)
        if kept is None or len(newest) == WINDOW_ROWS:
            self._rows[layer] = newest.clone()
        else:
            self._rows[layer] = torch.cat((kept, newest))[-WINDOW_ROWS:]

    def rows(self) -> Tensor:
        """`[L, W, H_q, D]`, those of positions `[end - W, end)`.

        Raises:
            ValueError: nothing was observed, or some layers saw other rows than others.
        """
        lengths = {layer: len(rows) for layer, rows in self._rows.items()}
        if not lengths or len(set(lengths.values())) != 1 or sorted(lengths) != list(range(len(lengths))):
            raise ValueError(f"expected rows of every layer, as many of each, got {lengths or 'none'}")
        return torch.stack([self._rows[layer] for layer in sorted(self._rows)])
