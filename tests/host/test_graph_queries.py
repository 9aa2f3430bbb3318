"""Queries of decode steps that a CUDA graph replays: kept by the capture, handed to the observers after the replay."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from sglang.srt.model_executor.forward_batch_info import ForwardMode
from sglang.srt.model_executor.model_runner import ModelRunnerOutput
from sglang.srt.model_executor.runner_backend_utils.breakable_cuda_graph.context import enable_breakable_cuda_graph
from sglang.srt.model_executor.runner_utils.capture_mode import model_capture_mode

from intentkv.engine import live_backends, observer, runtime
from intentkv.engine.graph_queries import DECODE_NEEDS, GraphQueries
from intentkv.engine.scoring import Scoring
from intentkv.score.base import Need
from tests.host.test_observer import batch, idle, planned, state_with

LAYERS = [SimpleNamespace(layer_id=n, tp_q_head_num=3, qk_head_dim=8) for n in range(2)]


class Base:
    """What a backend class does before graphs are captured."""

    def init_cuda_graph_state(self, max_bs: int, max_num_tokens: int) -> None:
        self.sizes = (max_bs, max_num_tokens)


def backend(*needs: Need, tokens: int = 4) -> Any:
    """A live backend whose graphs have been prepared for `tokens`, on a server whose scorer has these needs."""
    made = live_backends.live_class(Base)()
    made.make_queries = lambda size: (
        GraphQueries(LAYERS, size, torch.float32, "cpu") if DECODE_NEEDS & set(needs) else None
    )
    made.init_cuda_graph_state(4, tokens)
    assert made.sizes == (4, tokens)
    return made


class Graph:
    """A decode graph of two layers: what is captured is that the layers' queries are those of `rows` `[4, 3 * 8]`."""

    def __init__(self, attention: Any) -> None:
        self.attention = attention
        self.rows = torch.zeros(4, 3 * 8)
        self.capture()

    def capture(self) -> None:
        """Runs as it does at the capture: Python with hooks, and no request."""
        captured = SimpleNamespace(forward_mode=ForwardMode.DECODE)
        with model_capture_mode():
            for layer in LAYERS:
                q = self.rows * (layer.layer_id + 1)
                observer.observe_queries(None, self.attention, q, q, q, layer, captured)

    def replay(self, rows: torch.Tensor) -> None:
        """The kernels of the capture over new rows; `record` is one of them, and hooks are not."""
        self.rows[: len(rows)] = rows
        for layer in LAYERS:
            self.attention.graph_queries.record(layer, self.rows * (layer.layer_id + 1))


@pytest.fixture
def active(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    made = SimpleNamespace(
        views=SimpleNamespace(running=None),
        running_plan=None,
        states={},
        scoring=SimpleNamespace(surprise=None, attention=None),
        look=lambda *request: None,
        **idle(),
    )
    monkeypatch.setattr(runtime, "_runtime", made)
    return made


def decode(attention: Any, forward: Any, *rids: str, length: int) -> None:
    """One decode step of `rids`, each now of `length` tokens, that SGLang says it has replayed."""
    step = batch(*[(rid, length - 1, 1) for rid in rids], mode=ForwardMode.DECODE)
    step.out_cache_loc = None

    def replayed(runner: Any, same: Any) -> ModelRunnerOutput:
        forward()
        return ModelRunnerOutput(logits_output=None, can_run_graph=True)

    observer.observe_forward(replayed, SimpleNamespace(attn_backend=attention), step)


def test_a_replayed_graph_feeds_what_an_eager_step_feeds(active: SimpleNamespace) -> None:
    """Two requests in a graph for four, one of which is observed: its window grows by its own row, of every layer."""
    attention = backend("window")
    graph = Graph(attention)
    mine = active.states["mine"] = state_with((90, 100), 100, "window")
    mine.look = 1 << 30
    seen = []
    for length in range(101, 105):
        rows = torch.randn(2, 3 * 8)
        decode(attention, lambda rows=rows: graph.replay(rows), "other", "mine", length=length)
        seen.append(rows[1].view(3, 8))
    assert mine.window is not None and mine.window.end == 104
    assert torch.equal(mine.window.rows(), torch.stack([torch.stack(seen), torch.stack(seen) * 2]))


def test_actkv_gets_the_layers_of_a_replayed_graph(active: SimpleNamespace) -> None:
    attention = backend("keep_scores")
    graph = Graph(attention)
    got: list[Any] = []
    active.actions.watching = True
    active.actions.add = lambda backend, q, layer: got.append((backend, q.clone(), layer))
    rows = torch.randn(3, 3 * 8)
    decode(attention, lambda: graph.replay(rows), "a", "b", "c", length=9)
    assert [layer for *_, layer in got] == LAYERS
    for found, q, layer in got:
        assert found is attention and torch.equal(q.flatten(1), rows * (layer.layer_id + 1))


def test_nobody_pays_for_graphs_where_no_scorer_looks_at_decode_steps(active: SimpleNamespace) -> None:
    attention = backend("query", "surprise")
    assert attention.graph_queries is None
    observer.observe_queries(
        None, attention, *[torch.zeros(4, 24)] * 3, LAYERS[0], SimpleNamespace(forward_mode=ForwardMode.DECODE)
    )
    active.states["mine"] = state_with((90, 100), 100, "query", "surprise")
    active.states["mine"].look = 1 << 30
    decode(attention, lambda: None, "mine", length=101)


def test_a_graph_that_hides_its_queries_never_serves_a_request_that_needs_them(active: SimpleNamespace) -> None:
    """Such a request is refused, naming two ways out; if one came through all the same, nothing is scored wrongly."""
    attention = backend()
    assert live_backends.hides_queries(attention) and not live_backends.hides_queries(backend("attention"))
    scoring = Scoring.__new__(Scoring)
    scoring._hides_queries, scoring._kv_heads, scoring.surprise, scoring.attention = True, None, None, None
    scoring.needs = lambda name: frozenset({"window"} if name == "snapkv" else set())
    assert scoring.prepare("streaming") is None
    problem = scoring.prepare("snapkv")
    assert problem is not None and "--intentkv-scorer snapkv" in problem and "--disable-cuda-graph" in problem
    active.states["mine"] = state_with((90, 100), 100, "window")
    with pytest.raises(RuntimeError, match="keep their queries"):
        decode(attention, lambda: None, "mine", length=101)


def test_a_replayed_prefill_graph_is_observed_layer_by_layer(active: SimpleNamespace) -> None:
    """Attention runs between the segments of a breakable graph, hooks and all, though SGLang calls that a capture too."""
    attention = backend("window")
    mine = state_with((0, 5), 5, "window")
    active.running_plan = planned(batch(("mine", 0, 5)), {"mine": mine})
    rows = torch.randn(5, 3 * 8)
    with enable_breakable_cuda_graph():
        for layer in LAYERS:
            observer.observe_queries(
                None, attention, rows, rows, rows, layer, SimpleNamespace(forward_mode=ForwardMode.EXTEND)
            )
    assert mine.window is not None
    assert torch.equal(mine.window.rows(), torch.stack([rows.view(5, 3, 8)] * 2))
    assert not attention.graph_queries._rows[0].any(), "a prefill's rows belong to no decode graph"
