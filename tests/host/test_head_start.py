"""A residual head at server start: one that fits is served, any other stops the start with every reason."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import textwrap
from pathlib import Path

import numpy as np
import pytest
import torch
from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool, ReqToTokenPool

from intentkv.config import Budget, Settings
from intentkv.engine.metrics import NoMetrics
from intentkv.engine.runtime import Runtime
from intentkv.engine.state import RequestState
from intentkv.evals.model import tiny_checkpoint
from intentkv.observe.query_mean import QueryMean
from intentkv.observe.session import SessionKey
from intentkv.observe.spans import Spans
from intentkv.score.base import ScoreInput
from intentkv.score.head.identity import ModelIdentity
from intentkv.score.head.io import HeadInfo, save_head
from intentkv.score.head.model import ResidualHead
from intentkv.score.intent_head import IntentHeadScorer
from intentkv.score.memory import QueryMemory
from intentkv.score.registry import HEAD_SCORER


def write_head(path: Path, identity: ModelIdentity) -> Path:
    torch.manual_seed(0)
    head = ResidualHead(identity.head_dim)
    torch.nn.init.normal_(head.output.weight)
    save_head(path, head, HeadInfo(identity, "d" * 64, 0, "test", {}))
    return path


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_checkpoint(tmp_path_factory.mktemp("model"))


def dry_start(model: Path, *flags: str) -> list[str]:
    """The reasons of a start up to the loading of weights, in a process of its own."""
    code = f"""
        import json
        from intentkv.engine.doctor import examine
        print(json.dumps(examine({["--model-path", str(model), *flags]!r}).reasons))
    """
    result = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", textwrap.dedent(code)],
        env={**os.environ, "HF_HUB_OFFLINE": "1"},
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert result.returncode == 0, result.stderr[-3000:]
    reasons: list[str] = json.loads(result.stdout.strip().splitlines()[-1])
    return reasons


def identity_of(model: Path) -> ModelIdentity:
    from transformers import AutoConfig

    return ModelIdentity.of("trained-on", AutoConfig.from_pretrained(model))


def test_a_head_that_fits_is_served(model: Path, tmp_path: Path) -> None:
    head = write_head(tmp_path / "head.safetensors", identity_of(model))
    assert dry_start(model, "--intentkv-head", str(head)) == []


def test_another_models_head_stops_the_start_beside_other_reasons(model: Path, tmp_path: Path) -> None:
    other = ModelIdentity("other-model", "c" * 64, head_dim=64, layers=2, heads=9, kv_heads=2)
    head = write_head(tmp_path / "head.safetensors", other)
    assert dry_start(model, "--intentkv-head", str(head)) == [
        f"--intentkv-head {head}: it was trained for other-model with D = 64, and {model} has 32",
        f"--intentkv-head {head}: it was trained for other-model with query heads = 9, and {model} has 4",
    ]


def test_a_damaged_head_stops_the_start(model: Path, tmp_path: Path) -> None:
    head = write_head(tmp_path / "head.safetensors", identity_of(model))
    head.write_bytes(head.read_bytes()[:-4])
    (reason,) = dry_start(model, "--intentkv-head", str(head))
    assert reason.startswith(f"--intentkv-head {head}: expected a whole .safetensors file, cannot read it: ")


def test_the_runtime_scores_with_the_head_and_the_query_span(model: Path, tmp_path: Path) -> None:
    """The scheduler's own scoring, on SGLang's pool and rows, gives what the scorer gives for the same tokens."""
    head = write_head(tmp_path / "head.safetensors", identity_of(model))
    generator = torch.Generator().manual_seed(0)
    pool = MHATokenToKVPool(400, 1, torch.bfloat16, 2, 32, 2, "cpu", enable_memory_saver=False)
    for buffer in pool.k_buffer:
        buffer.copy_(torch.randn(buffer.shape, generator=generator))
    rows = ReqToTokenPool(2, 256, "cpu", enable_memory_saver=False)
    slots = torch.randperm(400, generator=generator)[:200] + 1
    rows.write((1, slice(0, 200)), slots.int())
    spans = Spans(system_end=10, query=(150, 200))
    holes = np.array([40, 41, 160])  # a hole in the query: an earlier message, come back to
    state = RequestState(SessionKey("s", "explicit"), "s", HEAD_SCORER, Budget.parse(20), spans, 200, holes=holes)
    for layer in range(2):
        state.query.add(layer, torch.randn(50, 4, 32, generator=generator))

    runtime = object.__new__(Runtime)  # without the scheduler that its constructor reads
    runtime.settings = Settings(scorer=HEAD_SCORER, head=str(head), trigger=8, recent=16)
    runtime.memory = QueryMemory(0.5, 4)
    runtime.metrics = NoMetrics()
    runtime.page_size = 1
    runtime._scorers, runtime._rows, runtime._pool, runtime._layers = {}, rows.req_to_token, pool, 2
    runtime.score(state, 1, 200, QueryMean())

    positions = np.setdiff1d(np.arange(10, 150), holes)
    query = state.query.mean()
    x = ScoreInput(
        layer_keys=pool.get_key_buffer,
        slots=slots[positions],
        positions=torch.from_numpy(positions),
        memory=torch.nn.functional.normalize(query, dim=-1),
        query=query,
        seed=0,
        num_layers=2,
        query_slots=slots[np.setdiff1d(np.arange(150, 200), holes)],
    )
    assert state.pending is not None
    expected = IntentHeadScorer.from_file(head).score(x).numpy()
    np.testing.assert_array_equal(state.pending.scores, expected)
