"""observe and score, while SGLang's own forward runs.

The plan of a forward says which rows of the query tensor each request wants observed; every attention layer feeds them
to the request's mean, and to what else its scorer needs; when the forward is done the history is scored on the same
stream, against keys that are fresh. A decode step that a CUDA graph replays passes no hook: its queries are fed from where
the graph has left them (`graph_queries`). Which rows the mean gets depends on the request's text and its next event alone: a
chunk may end anywhere.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from sglang.srt.model_executor.runner_utils.capture_mode import get_is_capture_mode
from torch import Tensor

from intentkv.engine import runtime
from intentkv.engine.collected import RowSink, row_sinks
from intentkv.engine.live_backends import decode_part
from intentkv.engine.state import RequestState
from intentkv.engine.surprise import Shard
from intentkv.observe.query_mean import QueryMean


@dataclass
class Watched:
    """One request of a prefill: rows [start, stop) of the query tensor go to `into`."""

    state: RequestState
    row: int  # row of req_to_token
    end: int  # logical length after this forward, tokens
    into: QueryMean
    start: int
    stop: int


@dataclass
class Fed:
    """Rows [start, stop) of the query tensor, all that a request computes in this forward, go to `sink`."""

    sink: RowSink
    start: int
    stop: int


class ForwardPlan:
    """Who wants which rows of the forward that is running: the watched requests of a prefill, and all that scorers need."""

    def __init__(self, watched: list[Watched], fed: list[Fed]) -> None:
        self.watched = watched
        self.fed = fed

    def feed(self, layer: int, queries: Tensor) -> None:
        """Take the rows of one layer, whose keys are in the pool; `queries` is [tokens, H_q, D]."""
        for request in self.watched:
            if request.start < request.stop:
                request.into.add(layer, queries[request.start : request.stop])
        for fed in self.fed:
            fed.sink.add(layer, queries[fed.start : fed.stop])


def plan_forward(
    forward_batch: Any, states: Mapping[str, RequestState], spans: list[tuple[str, int, int]]
) -> ForwardPlan | None:
    """Which rows to watch, from host-known lengths only; None when nobody of ours wants any. `spans`: as of `computed`."""
    mode = forward_batch.forward_mode
    watched: list[Watched] = []
    fed: list[Fed] = []
    offset = 0
    for index, (rid, begin, end) in enumerate(spans):
        state = states.get(rid)
        sinks = row_sinks(state) if state is not None else []
        if state is not None and (sinks or mode.is_extend()):
            row = int(forward_batch.intentkv_rows[index])
            for sink in sinks:
                sink.begin(row, begin, end)
                fed.append(Fed(sink, offset, offset + end - begin))
            if mode.is_extend():
                watched.append(_watch(state, row, offset, begin, end))
        offset += end - begin
    return ForwardPlan(watched, fed) if watched or fed else None


def computed(forward_batch: Any) -> list[tuple[str, int, int]]:
    """Each request with the positions [begin, end) that this forward computes; none for what is neither prefill nor decode."""
    rids, mode = forward_batch.rids, forward_batch.forward_mode
    if rids is None or not (mode.is_extend() or mode.is_decode()):
        return []
    if mode.is_decode():
        return [(rid, n - 1, n) for rid, n in zip(rids, forward_batch.seq_lens_cpu.tolist(), strict=True)]
    prefixes, lengths = forward_batch.extend_prefix_lens_cpu, forward_batch.extend_seq_lens_cpu
    return [(rid, prefix, prefix + n) for rid, prefix, n in zip(rids, prefixes, lengths, strict=True)]


def _watch(state: RequestState, row: int, offset: int, begin: int, end: int) -> Watched:
    """The rows of a prefill that tell what is asked: those of the query span, or a glimpse of it."""
    first, last, into = _wanted(state, begin, end)
    shift = offset - begin
    return Watched(state, row, end, into, first + shift, last + shift)


def _wanted(state: RequestState, prefix: int, end: int) -> tuple[int, int, QueryMean]:
    """Positions of `[prefix, end)` to observe, `[first, last)`, and the mean they go to."""
    if state.turn is not None or "query" not in state.needs:
        return end, end, state.query  # a retracted request computes again what was observed before
    first, last = max(prefix, state.spans.query[0]), min(end, state.spans.query[1])
    if first < last:
        return first, last, state.query
    return max(prefix, state.glimpse_from), min(end, state.look), state.glimpse


def carry_rows(result: Any, kind: type, batch: Any, *args: Any, **kwargs: Any) -> None:
    """After ForwardBatch.init_new: keep the host's copy of the batch's rows, which SGLang passes on only for prefills."""
    result.intentkv_rows = batch.req_pool_indices_cpu


def observe_forward(original: Callable[..., Any], runner: Any, forward_batch: Any, *args: Any, **kwargs: Any) -> Any:
    """Around ModelRunner.forward: plan before, score after. Before `attach` (warm-up, graph capture) it does nothing."""
    active = runtime.current_or_none()
    if active is None:
        return original(runner, forward_batch, *args, **kwargs)
    # Only batches that the scheduler made have rows; what SGLang makes up itself (padding, warm-up) reads as stock.
    rows = getattr(forward_batch, "intentkv_rows", None)
    active.views.running = None if rows is None else rows.numpy()
    try:
        return _observed(active, original, runner, forward_batch, *args, **kwargs)
    finally:
        active.views.running = None


def _observed(
    active: runtime.Runtime, original: Callable[..., Any], runner: Any, forward_batch: Any, *args: Any, **kwargs: Any
) -> Any:
    active.confidence.expect(forward_batch)
    active.actions.begin(forward_batch)
    if active.scoring.attention is not None and forward_batch.out_cache_loc is not None:
        active.scoring.attention.forget(forward_batch.out_cache_loc)
    spans = computed(forward_batch)
    if active.scoring.surprise is not None:
        active.scoring.surprise.begin(forward_batch, active.states, spans)
    plan = active.running_plan = plan_forward(forward_batch, active.states, spans)
    try:
        output = original(runner, forward_batch, *args, **kwargs)
    finally:
        active.running_plan = None
    if forward_batch.forward_mode.is_decode():
        if (plan is not None or active.actions.watching) and output.can_run_graph:
            feed_replayed(active, plan, runner.attn_backend, len(forward_batch.rids))
        score_decoding(active, forward_batch)
    for request in plan.watched if plan is not None else ():
        active.look(request.state, request.row, request.end)
    return output


def score_decoding(active: runtime.Runtime, forward_batch: Any) -> None:
    """Look at requests that have generated enough for another event; the lengths alone say which, and cost nothing."""
    for index, (rid, length) in enumerate(zip(forward_batch.rids, forward_batch.seq_lens_cpu.tolist(), strict=True)):
        state = active.states.get(rid)
        if state is not None and length >= state.look:
            active.look(state, int(forward_batch.intentkv_rows[index]), length)


def feed_replayed(active: runtime.Runtime, plan: ForwardPlan | None, backend: Any, tokens: int) -> None:
    """After a decode graph of `tokens` requests was replayed: what `observe_queries` does layer by layer in an eager step.

    Raises:
        RuntimeError: the graph keeps no queries; no request that needs them may have been let in.
    """
    queries = decode_part(backend).graph_queries
    if queries is None:
        raise RuntimeError("expected decode graphs that keep their queries, got ones that do not: report this as a bug")
    for layer, rows in queries.replayed(tokens):
        if plan is not None:
            plan.feed(layer.layer_id, rows)
        active.actions.add(backend, rows, layer)


def observe_queries(
    result: Any,
    backend: Any,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    layer: Any,
    forward_batch: Any,
    *args: Any,
    **kwargs: Any,
) -> None:
    """After AttentionBackend.forward, which has put the new keys into the pool: hand this layer's rotated queries to the
    running plan, if there is one; while a decode graph is captured, have it keep them."""
    # SGLang calls a replay of the breakable prefill graph a capture too; the layers of that one are to be observed.
    if get_is_capture_mode() and forward_batch.forward_mode.is_decode():
        kept = getattr(decode_part(backend), "graph_queries", None)
        if kept is not None:
            kept.record(layer, q)
    active = runtime.current_or_none()
    if active is not None and active.running_plan is not None:
        active.running_plan.feed(layer.layer_id, q.view(q.shape[0], layer.tp_q_head_num, layer.qk_head_dim))
    if active is not None:
        active.actions.add(backend, q, layer)


def observe_hidden_states(
    processor: Any, input_ids: Tensor, hidden: Tensor, lm_head: Any, batch: Any, *rest: Any
) -> None:
    """Before LogitsProcessor.forward: measure the surprise of a prefill's tokens, for requests whose scorer asks for it."""
    active = runtime.current_or_none()
    if active is not None and active.scoring.surprise is not None and batch.forward_mode.is_extend():
        scale = processor.logit_scale if processor.logit_scale is not None else 1.0
        active.scoring.surprise.observe(hidden, input_ids, batch.out_cache_loc, Shard.of(lm_head), scale)
