"""Every scorer of the registry in the real runtime: it is given what it needs, over chunks, an event and a generation."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from sglang.srt.model_executor.forward_batch_info import ForwardBatch
from sglang.srt.model_executor.model_runner import ModelRunnerOutput
from sglang.srt.runtime_context import get_context

from intentkv.apply.rows import NO_POSITIONS
from intentkv.config import Budget, Settings
from intentkv.engine import observer, runtime
from intentkv.engine.cpu_attention import CpuAttentionBackend
from intentkv.engine.state import RequestState
from intentkv.observe.session import SessionKey
from intentkv.observe.spans import Spans
from intentkv.score.base import ScoreInput
from intentkv.score.registry import SCORERS
from tests.host.models import WORDS, Model, small_tokenizer
from tests.kernels.host import DIM, H_Q, Host
from tests.unit.heads import untrained_head

PROMPT, CHUNK, TRIGGER, ANSWER = 100, 64, 8, 60


class Server:
    """One request on the real pool, backend and runtime, one layer and no scheduler."""

    def __init__(self, scorer: str, page_size: int, folder: Path) -> None:
        get_context().override_server_args(attention_backend="torch_native", device="cpu").install()
        self.host = Host(page_size, torch.float32)
        runner = self.host.runner
        self.backend = CpuAttentionBackend(runner)
        runner.model, runner.attn_backend = Model(self.host.layer), self.backend
        runner.sampling_observer = None
        runner.model_config = SimpleNamespace(num_hidden_layers=1)
        scheduler = SimpleNamespace(
            tp_worker=SimpleNamespace(model_runner=runner),
            tree_cache=SimpleNamespace(),
            tokenizer=small_tokenizer(),
            server_args=SimpleNamespace(chat_template=None),
            req_to_token_pool=self.host.rows,
            token_to_kv_pool_allocator=SimpleNamespace(get_kvcache=lambda: self.host.pool),
            page_size=page_size,
            chunked_prefill_size=CHUNK,
        )
        head = untrained_head(folder, DIM)
        settings = Settings(scorer=scorer, head=head, budget=Budget("fixed", 16), trigger=TRIGGER, recent=8)
        self.runtime = runtime.Runtime(settings, scheduler)
        self.state = self.runtime.states["mine"] = RequestState(
            key=SessionKey("k", "explicit"),
            label="k",
            scorer=scorer,
            budget=settings.budget,
            spans=Spans(system_end=4, query=(90, PROMPT)),
            prompt=np.random.default_rng(0).integers(0, len(WORDS), PROMPT),
            needs=self.runtime.scoring.needs(scorer),
            tap=self.runtime.scoring.tap(scorer),
        )
        self.runtime.open_session(self.state, self.state.prompt)
        self.host.fill_row(1, 200)
        admitted = SimpleNamespace(intentkv=self.state, full_untruncated_fill_ids=range(PROMPT))
        self.runtime.admit(admitted, 0, NO_POSITIONS)

    def forward(self, start: int, end: int) -> np.ndarray:
        """Compute positions [start, end), then do what a checkpoint does: drop what the event asks for. Returns that."""
        decode = end > PROMPT
        batch: ForwardBatch = self.host.batch([end], None if decode else [end - start])
        batch.rids, batch.seq_lens_cpu = ["mine"], batch.seq_lens
        batch.intentkv_rows = batch.req_pool_indices
        if not decode:
            batch.extend_seq_lens_cpu, batch.extend_prefix_lens_cpu = [end - start], [start]
        q, k, v = self.host.qkv(end - start)
        assert q.shape == (end - start, H_Q * DIM)

        def model(runner: Any, same: ForwardBatch) -> ModelRunnerOutput:
            self.backend.init_forward_metadata(same)
            output = self.backend.forward(q, k, v, self.host.layer, same)
            observer.observe_queries(output, self.backend, q, k, v, self.host.layer, same)
            return ModelRunnerOutput(logits_output=None, can_run_graph=False)

        observer.observe_forward(model, None, batch)
        if self.state.pending is None:
            return np.empty(0, np.int64)
        drop = self.runtime.decide(SimpleNamespace(intentkv=self.state, finished=lambda: False), end)
        self.state.holes = np.union1d(self.state.holes, drop)
        positions = torch.from_numpy(drop)
        self.host.rows.req_to_token[1, positions] = (positions % self.host.page_size).int()
        self.runtime.cache.views.set_holes(1, self.state.holes, end)
        return drop


@pytest.fixture
def served(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Server]:
    made = Server(*request.param, tmp_path)
    monkeypatch.setattr(runtime, "_runtime", made.runtime)
    yield made


@pytest.mark.parametrize(
    "served",
    [(name, size) for name in SCORERS for size in (1, 16)],
    indirect=True,
    ids=[f"{name}, page {size}" for name in SCORERS for size in (1, 16)],
)
def test_every_scorer_runs(served: Server) -> None:
    """A chunk in front of the query, the rest of the prompt, and a generation of 60 tokens; page 0 is full of NaN, so that any read
    of a dropped token would show in the scores."""
    drops = [served.forward(0, CHUNK), served.forward(CHUNK, PROMPT)]
    drops += [served.forward(end - 1, end) for end in range(PROMPT + 1, PROMPT + ANSWER + 1)]
    page = served.host.page_size
    assert len(drops[0]) and any(len(drop) for drop in drops[1 : 1 + page]), (
        "an event after each chunk, at a page's end"
    )
    # ActKV waits for the end of a tool call, and there is none.
    generating = served.state.action is None
    assert any(len(drop) for drop in drops[1 + page :]) == generating, "and one while generating"
    everything = np.concatenate(drops)
    assert len(np.unique(everything)) == len(everything)
    assert served.state.events == sum(len(drop) > 0 for drop in drops)
    assert not np.isin(everything, [*range(4), *range(90, PROMPT)]).any()
    grown = TRIGGER if generating else ANSWER
    assert PROMPT + ANSWER - len(everything) <= 4 + 10 + 8 + 16 + grown + 4 * page


@pytest.mark.parametrize("served", [("streaming", 1)], indirect=True)
def test_who_needs_nothing_pays_nothing(served: Server) -> None:
    served.forward(0, CHUNK)
    assert served.runtime.scoring.attention is None
    assert served.runtime.scoring.surprise is None
    assert served.state.window is None and served.state.tap is None


@pytest.mark.parametrize("served", [("streaming", 1)], indirect=True)
def test_the_query_is_told_by_its_slots(served: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    """Before it is reached, by those of the tokens before the event; without what has been dropped."""
    seen = []
    scorer = served.runtime.scoring._scorer("streaming")

    def score(x: ScoreInput) -> torch.Tensor:
        seen.append(x.query_slots)
        return type(scorer).score(scorer, x)

    monkeypatch.setattr(scorer, "score", score)
    row = served.host.rows.req_to_token[1].clone()
    served.forward(0, CHUNK)
    served.forward(CHUNK, PROMPT)
    assert torch.equal(seen[0], row[:CHUNK].long())
    assert torch.equal(seen[1], row[90:PROMPT].long())
