"""observe and score, while SGLang's own forward runs.

The plan of a prefill says which rows of the query tensor each request wants observed; every attention layer feeds them
to the request's mean; when the forward is done the history is scored on the same stream, against keys that are fresh.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from intentkv.engine import runtime
from intentkv.engine.state import RequestState
from intentkv.observe.query_mean import QueryMean
from intentkv.observe.spans import GLIMPSE_TOKENS


@dataclass
class Watched:
    """One request of a prefill: rows [start, stop) of the query tensor go to `into`."""

    state: RequestState
    row: int  # row of req_to_token
    end: int  # logical length after this forward, tokens
    into: QueryMean
    start: int
    stop: int


class ForwardPlan:
    """The watched requests of the prefill that is running."""

    def __init__(self, watched: list[Watched]) -> None:
        self.watched = watched

    def feed(self, layer: int, queries: Tensor) -> None:
        """Take the rows of one layer; `queries` is [tokens, H_q, D]."""
        for request in self.watched:
            request.into.add(layer, queries[request.start : request.stop])


def plan_forward(forward_batch: Any, states: Mapping[str, RequestState]) -> ForwardPlan | None:
    """Which rows to watch, from host-known lengths only; None when the batch prefills nothing of ours."""
    if not forward_batch.forward_mode.is_extend() or forward_batch.rids is None:
        return None
    watched: list[Watched] = []
    offset = 0
    for rid, row, prefix, length in zip(
        forward_batch.rids,
        forward_batch.req_pool_indices_cpu.tolist(),
        forward_batch.extend_prefix_lens_cpu,
        forward_batch.extend_seq_lens_cpu,
        strict=True,
    ):
        state = states.get(rid)
        if state is not None:
            end = prefix + length
            first, last = max(prefix, state.spans.query[0]), min(end, state.spans.query[1])
            into = state.query
            if first >= last:
                first, last, into = max(prefix, end - GLIMPSE_TOKENS), end, QueryMean()
            shift = offset - prefix
            watched.append(Watched(state, row, end, into, first + shift, last + shift))
        offset += length
    return ForwardPlan(watched) if watched else None


def observe_forward(original: Callable[..., Any], runner: Any, forward_batch: Any, *args: Any, **kwargs: Any) -> Any:
    """Around ModelRunner.forward: plan before, score after. Before `attach` (warm-up, graph capture) it does nothing."""
    active = runtime.current_or_none()
    if active is None:
        return original(runner, forward_batch, *args, **kwargs)
    plan = plan_forward(forward_batch, active.states)
    if plan is None:
        output = original(runner, forward_batch, *args, **kwargs)
        if forward_batch.forward_mode.is_decode():
            score_decoding(active, forward_batch)
        return output
    active.running_plan = plan
    try:
        output = original(runner, forward_batch, *args, **kwargs)
    finally:
        active.running_plan = None
    for request in plan.watched:
        active.score(request.state, request.row, request.end, request.into)
    return output


def score_decoding(active: runtime.Runtime, forward_batch: Any) -> None:
    """Score requests that have generated enough for another event; the lengths alone say which, and cost nothing."""
    for index, (rid, length) in enumerate(zip(forward_batch.rids, forward_batch.seq_lens_cpu.tolist(), strict=True)):
        state = active.states.get(rid)
        if state is not None and state.memory is not None and length >= state.next_look:
            active.score(state, int(forward_batch.req_pool_indices[index]), length, state.query)


def observe_queries(backend: Any, q: Tensor, k: Tensor, v: Tensor, layer: Any, *args: Any, **kwargs: Any) -> None:
    """Before AttentionBackend.forward: hand this layer's rotated queries to the running plan, if there is one."""
    active = runtime.current_or_none()
    if active is not None and active.running_plan is not None:
        active.running_plan.feed(layer.layer_id, q.view(q.shape[0], layer.tp_q_head_num, layer.qk_head_dim))
