"""What is collected only for requests whose scorer needs it: where it comes from while SGLang runs, and what the scorer gets."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import torch
from torch import Tensor

from intentkv.apply.live_view import LiveViews
from intentkv.apply.rows import live_positions
from intentkv.engine.state import RequestState
from intentkv.observe.attention_mass import AttentionMass
from intentkv.observe.query_mean import QueryMean
from intentkv.observe.query_moments import QueryMoments
from intentkv.score.base import Window


class AttentionTap:
    """Adds one request's attention to the pool's `AttentionMass`, forward by forward; reads what attention reads."""

    def __init__(
        self,
        mass: AttentionMass,
        layer_keys: Callable[[int], Tensor],
        req_to_token: Tensor,
        views: LiveViews,
        scale: float,
    ) -> None:
        self._mass = mass
        self._layer_keys = layer_keys
        self._req_to_token = req_to_token
        self._views = views
        self._scale = scale
        self._slots = torch.empty(0, dtype=torch.int64)

    def begin(self, row: int, start: int, end: int) -> None:
        """The next rows are those of positions `[start, end)` of `row`, which see its live positions and each other."""
        computed = self._req_to_token[row, start:end].to(torch.int64)
        self._slots = torch.cat((self._views.slots(row, start), computed))

    def add(self, layer: int, queries: Tensor) -> None:
        """Add one layer's attention; `queries` `[end - start, H_q, D]`. The keys must be in the pool by now."""
        self._mass.add(queries, self._layer_keys(layer), self._slots, self._scale)

    def received(self, slots: Tensor) -> Tensor:
        """What `slots` `[n]` int64 have received so far, from all requests that are observed; `[n]` float32, a copy."""
        return self._mass.received[slots]


class RowSink(Protocol):
    """What wants every query row of a request: `QueryWindow`, `AttentionTap`."""

    def begin(self, row: int, start: int, end: int) -> None: ...

    def add(self, layer: int, queries: Tensor) -> None: ...


def row_sinks(state: RequestState) -> list[RowSink]:
    return [sink for sink in (state.window, state.tap) if sink is not None]


def window_input(state: RequestState, row: Tensor, length: int, scale: float) -> Window | None:
    """The window of a request of `length` tokens in `row` `[ctx]`; None where its scorer needs none."""
    if state.window is None:
        return None
    queries = state.window.rows()
    positions = torch.from_numpy(live_positions(0, length, state.holes))
    slots = row[positions.to(row.device)].to(torch.int64)
    return Window(queries, state.window.end - queries.shape[1], slots, positions, scale)


def covariance_input(query: QueryMean) -> Tensor | None:
    return query.covariance() if isinstance(query, QueryMoments) else None
