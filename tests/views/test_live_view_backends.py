"""Triton, FlashInfer and FA3 without a GPU: index by index in Triton's interpreter, and what holds for all of them.

None of this has touched a GPU; `tests/gpu` waits for one.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from intentkv.engine import live_backends, observer, runtime
from tests.kernels.test_live_view import Operators
from tests.views.setting import CASES, ROWS, Setting, pruned, replay_view

HERE = Path(__file__).parent


@pytest.mark.parametrize("backend", ["triton", "fa3", "flashinfer"])
def test_backend_in_the_interpreter(backend: str) -> None:
    """All tests of `case_<backend>.py`: Triton decides at import whether it interprets."""
    result = subprocess.run(
        [sys.executable, "-W", "ignore", "-m", "pytest", "-q", "-p", "no:cacheprovider", HERE / f"case_{backend}.py"],
        env={**os.environ, "TRITON_INTERPRET": "1"},
        cwd=HERE.parent.parent,
        capture_output=True,
        text=True,
        timeout=900,
        check=False,
    )
    assert result.returncode == 0, result.stdout[-6000:] + result.stderr[-2000:]
    counts = dict(reversed(pair) for pair in re.findall(r"(\d+) (passed|skipped|failed|error)", result.stdout))
    assert set(counts) == {"passed"} and int(counts["passed"]) >= 7


class Spy:
    """Stands for a backend class: keeps what its entry points are shown, and where it would read slots."""

    def __init__(self, setting: Setting) -> None:
        self.kv_index_translator = setting.runner.kv_index_translator
        self.req_to_token_pool = setting.runner.req_to_token_pool
        self.req_to_token = self.req_to_token_pool.req_to_token
        self.seen: list[Any] = []
        self.tables: list[torch.Tensor] = []
        self.fails = False

    def init_forward_metadata(self, forward_batch: Any) -> None:
        self.init_forward_metadata_out_graph(forward_batch)  # as the base class of all backends does

    def init_forward_metadata_out_graph(self, forward_batch: Any, in_capture: bool = False) -> None:
        self.seen.append(forward_batch)
        self.tables = [self.req_to_token, self.req_to_token_pool.req_to_token, self.kv_index_translator.req_to_token]
        if self.fails:
            raise ValueError("planned")


@pytest.fixture(params=CASES)
def setting(request: pytest.FixtureRequest) -> Setting:
    return pruned(request.param, 16)


@pytest.fixture
def spy(setting: Setting) -> Any:
    backend = live_backends.live_class(Spy)(setting)
    live_backends.attach_views(backend, setting.views)
    return backend


def test_one_table_wherever_slots_are_read_and_the_old_one_afterwards(setting: Setting, spy: Any) -> None:
    before = dict(vars(spy))
    stock = setting.runner.req_to_token_pool.req_to_token
    spy.init_forward_metadata(setting.batch)
    assert len(spy.seen) == 1 and spy.seen[0] is not setting.batch
    assert all(table is spy.tables[0] for table in spy.tables) and spy.tables[0] is not stock
    spy.fails = True
    with pytest.raises(ValueError, match="planned"):
        spy.init_forward_metadata(setting.batch)
    for name in ("kv_index_translator", "req_to_token_pool", "req_to_token"):
        assert getattr(spy, name) is before[name]
    assert setting.runner.kv_index_translator.req_to_token is stock
    assert spy.views.running.tolist() == list(ROWS)


def test_the_batch_itself_stays_logical(setting: Setting, spy: Any) -> None:
    """Positions, slots to write and the scheduler's lengths are those of the whole text, during and after."""
    batch = setting.batch
    before = {name: value.clone() for name, value in vars(batch).items() if isinstance(value, torch.Tensor)}
    spy.init_forward_metadata(batch)
    for name, value in before.items():
        assert torch.equal(getattr(batch, name), value), name
    shown = spy.seen[0]
    assert shown.positions is batch.positions and shown.out_cache_loc is batch.out_cache_loc
    assert shown.seq_lens.tolist() == shown.seq_lens_cpu.tolist() == [len(slots) for slots in setting.live]
    assert shown.seq_lens.dtype == batch.seq_lens.dtype and shown.seq_lens_sum == sum(shown.seq_lens_cpu.tolist())
    if not batch.forward_mode.is_decode():
        lens = [len(slots) for slots in setting.prefix]
        assert shown.extend_prefix_lens.tolist() == shown.extend_prefix_lens_cpu == lens
        assert shown.extend_prefix_lens.dtype == batch.extend_prefix_lens.dtype
        assert shown.extend_seq_lens is batch.extend_seq_lens


@pytest.mark.parametrize("why", ["no views", "outside a forward", "no holes", "holes of other rows"])
def test_without_holes_stock_gets_its_own_batch_and_nothing_runs(setting: Setting, spy: Any, why: str) -> None:
    if why == "no views":
        spy.views = None
    elif why == "outside a forward":
        spy.views.running = None
    else:
        for row in ROWS:
            spy.views.clear(row)
        if why == "holes of other rows":
            spy.views.set_holes(7, np.array([1]), 4)
    with Operators() as ran:
        spy.init_forward_metadata(setting.batch)
        spy.init_forward_metadata_out_graph(setting.batch)
    assert all(shown is setting.batch for shown in spy.seen) and not ran.names
    assert spy.tables[0] is setting.runner.req_to_token_pool.req_to_token


def test_nothing_is_read_back_from_the_device(setting: Setting, spy: Any) -> None:
    with Operators() as ran:
        spy.init_forward_metadata(setting.batch)
    assert "index" in ran.names
    assert not {"_local_scalar_dense", "nonzero", "masked_select", "item", "equal"} & set(ran.names)


def test_a_batch_without_host_lengths_is_an_error_and_not_a_wrong_answer(setting: Setting, spy: Any) -> None:
    setting.batch.seq_lens_cpu = None
    with pytest.raises(RuntimeError, match="seq_lens_cpu"):
        spy.init_forward_metadata(setting.batch)


def test_a_padded_graph_view_keeps_its_padding() -> None:
    setting = pruned("decode", 1)
    backend = live_backends.live_class(Spy)(setting)
    live_backends.attach_views(backend, setting.views)
    backend.init_forward_metadata_out_graph(replay_view(setting, padding=3))
    shown, live = backend.seen[0], [len(slots) for slots in setting.live]
    assert shown.seq_lens.tolist() == shown.seq_lens_cpu.tolist() == [*live, 1, 1, 1]
    assert shown.req_pool_indices.tolist() == list(range(len(live) + 3))
    assert shown.seq_lens_sum == sum(live) + 3 and len(spy_table := backend.tables[0]) == len(live) + 3
    assert spy_table[len(live) :, 0].tolist() == [int(setting.host.rows.req_to_token[0, 0])] * 3


def test_a_forward_has_its_rows_and_leaves_none_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    """`running` is what the scheduler's batch carried, while ModelRunner.forward runs, and only then."""
    active = SimpleNamespace(views=SimpleNamespace(running=None), states={})
    monkeypatch.setattr(runtime, "_runtime", active)
    mode = SimpleNamespace(is_extend=lambda: False, is_decode=lambda: False)
    batch = SimpleNamespace(forward_mode=mode, rids=[], out_cache_loc=None)
    scheduled = SimpleNamespace(req_pool_indices_cpu=torch.tensor([5, 2]))
    assert observer.carry_rows(batch, type(batch), scheduled) is None
    seen = []

    def forward(runner: Any, forward_batch: Any) -> str:
        seen.append(active.views.running)
        if len(seen) > 2:
            raise ValueError("planned")
        return "output"

    assert observer.observe_forward(forward, None, batch) == "output"
    made_up = SimpleNamespace(forward_mode=mode, rids=None, out_cache_loc=None)  # SGLang's own idle and warm-up batches
    assert observer.observe_forward(forward, None, made_up) == "output"
    with pytest.raises(ValueError, match="planned"):
        observer.observe_forward(forward, None, batch)
    assert seen[0].tolist() == [5, 2] and seen[1] is None and active.views.running is None
