"""SGLang's FlashInfer backend with live views. Real: the class, both index updaters, the index kernel in the interpreter.

Stand-ins: FlashInfer's wrappers, which compile CUDA when they plan; here they keep the plan they are given, and that is what
is asserted. Where SGLang asks for device "cuda" by name, it gets the CPU.

Run by `test_live_view_backends.py` in a process of its own.
"""

from __future__ import annotations

import itertools
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from sglang.srt.layers.attention import flashinfer_backend
from sglang.srt.layers.attention.attention_registry import ATTENTION_BACKENDS
from sglang.srt.layers.attention.flashinfer_backend import FlashInferAttnBackend
from sglang.srt.layers.attention.hybrid_attn_backend import HybridAttnBackend

from intentkv.engine import live_backends
from tests.views.setting import EVENTS, PAGES, Setting, capture, compacted, pruned, replay_view


class Wrapper:
    """Keeps the last plan by the names of FlashInfer's parameters."""

    def __init__(self, workspace: torch.Tensor, layout: str, **settings: Any) -> None:
        self.is_cuda_graph_enabled = settings.get("use_cuda_graph", False)
        self._paged_kv_indices_buf = settings.get("paged_kv_indices_buffer")
        self.plan: dict[str, Any] = {}


class Ragged(Wrapper):
    def begin_forward(self, qo_indptr: torch.Tensor, kv_indptr: torch.Tensor, *sizes: Any, **options: Any) -> None:
        self.plan = {"qo": qo_indptr.clone(), "kv": kv_indptr.clone()}


class PagedPrefill(Wrapper):
    def begin_forward(
        self, qo_indptr: torch.Tensor, kv_indptr: torch.Tensor, kv_indices: torch.Tensor, *rest: Any, **options: Any
    ) -> None:
        self.plan = {"qo": qo_indptr.clone(), "kv": kv_indptr.clone(), "indices": kv_indices.clone(), "last": rest[0]}


class Decode(Wrapper):
    def begin_forward(self, kv_indptr: torch.Tensor, kv_indices: torch.Tensor, *rest: Any, **options: Any) -> None:
        host = flashinfer_backend.global_override_indptr_cpu
        self.plan = {"kv": kv_indptr.clone(), "indices": kv_indices.clone(), "last": rest[0], "host": host.clone()}


def plan_for_replay(wrapper: Decode, *plan: Any, **options: Any) -> None:
    """In place of `fast_decode_plan`, which SGLang puts into the wrappers of captured graphs."""
    Decode.begin_forward(wrapper, *plan)
    assert torch.equal(options["global_override_indptr_cpu"], wrapper.plan["host"])


class OnCpu:
    """The torch module, but for tensors asked for on "cuda"."""

    def __getattr__(self, name: str) -> Any:
        found = getattr(torch, name)
        if name not in ("empty", "zeros"):
            return found
        return lambda *size, **options: found(*size, **{**options, "device": "cpu"})


@pytest.fixture(autouse=True)
def without_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    wrappers = {"BatchDecodeWithPagedKVCacheWrapper": Decode, "BatchPrefillWithPagedKVCacheWrapper": PagedPrefill}
    wrappers |= {"BatchPrefillWithRaggedKVCacheWrapper": Ragged, "fast_decode_plan": plan_for_replay, "torch": OnCpu()}
    wrappers["should_use_tensor_core"] = lambda **sizes: False
    for name, stand_in in wrappers.items():
        monkeypatch.setattr(flashinfer_backend, name, stand_in, raising=False)


live_backends.register()


def ours(setting: Setting) -> FlashInferAttnBackend:
    backend = ATTENTION_BACKENDS["flashinfer"](setting.runner)
    live_backends.attach_views(backend, setting.views)
    return backend


def lists(plan: dict[str, torch.Tensor]) -> list[list[int]]:
    ends = plan["kv"].tolist()
    return [plan["indices"][a:b].tolist() for a, b in itertools.pairwise(ends)]


def as_ints(slots: list[torch.Tensor]) -> list[list[int]]:
    return [each.tolist() for each in slots]


def same_plan(ours: dict[str, torch.Tensor], stock: dict[str, torch.Tensor]) -> None:
    """All of two plans, but for what lies behind the last index."""
    assert ours.keys() == stock.keys()
    for name in ours:
        end = ours["kv"][-1] if name == "indices" else None
        assert torch.equal(ours[name][:end], stock[name][:end]), name


@pytest.mark.parametrize("page_size", PAGES)
def test_decode_plan(page_size: int) -> None:
    setting = pruned("decode", page_size)
    backend = ours(setting)
    backend.init_forward_metadata(setting.batch)
    plan = backend.decode_wrappers[0].plan
    assert lists(plan) == as_ints(setting.live)
    assert plan["host"].diff().tolist() == [len(slots) for slots in setting.live]
    assert plan["last"].tolist() == [1] * len(setting.live)  # FlashInfer reads slots as pages of one

    short = compacted(setting)
    stock = FlashInferAttnBackend(short.runner)
    stock.init_forward_metadata(short.batch)
    same_plan(plan, stock.decode_wrappers[0].plan)
    q, _, _ = setting.host.qkv(len(setting.batch.input_ids))
    built = [torch.tensor(slots) for slots in lists(plan)]
    torch.testing.assert_close(setting.through(q, built), setting.exact(q), rtol=0, atol=1e-12)


@pytest.mark.parametrize("page_size", PAGES)
@pytest.mark.parametrize("paged", [False, True], ids=["ragged", "paged"])
def test_prefill_plan(paged: bool, page_size: int) -> None:
    setting = pruned("extend", page_size, whole_pages=False)
    short = compacted(setting)
    backend, stock = ours(setting), FlashInferAttnBackend(short.runner)
    for each, batch in ((backend, setting.batch), (stock, short.batch)):
        each.use_paged = paged
        each.init_forward_metadata(batch)
    plan = backend.prefill_wrappers_paged[0].plan
    # Ragged: the new tokens by their own keys, causally, and the prefix by its slots, all of it visible.
    assert lists(plan) == as_ints(setting.live if paged else setting.prefix)
    assert plan["qo"].diff().tolist() == setting.new
    same_plan(plan, stock.prefill_wrappers_paged[0].plan)
    assert backend.forward_metadata.use_ragged != paged and not backend.forward_metadata.extend_no_prefix
    if not paged:
        ragged = backend.prefill_wrapper_ragged.plan
        assert ragged["qo"].diff().tolist() == ragged["kv"].diff().tolist() == setting.new
    q, _, _ = setting.host.qkv(len(setting.batch.input_ids))
    own = [slots[len(slots) - new :].tolist() for slots, new in zip(setting.full, setting.new)]
    built = [torch.tensor(a if paged else a + b) for a, b in zip(lists(plan), own)]
    torch.testing.assert_close(setting.through(q, built), setting.exact(q), rtol=0, atol=1e-12)


@pytest.mark.parametrize("page_size", PAGES)
def test_a_replayed_graph_finds_live_rows_in_the_captured_buffers(page_size: int) -> None:
    setting = pruned("decode", page_size)
    short = compacted(setting)
    backend, stock = ours(setting), FlashInferAttnBackend(short.runner)
    views = (replay_view(setting), replay_view(short))
    running, setting.views.running = setting.views.running, None
    for each, shown in zip((backend, stock), views):
        each.init_cuda_graph_state(8, 8)
        each.init_forward_metadata_out_graph(shown, in_capture=True)
    (captured,) = backend.decode_cuda_graph_metadata[views[0].batch_size]
    setting.views.running = running
    for each, shown in zip((backend, stock), views):
        each.init_forward_metadata_out_graph(shown)

    assert backend.decode_cuda_graph_metadata[views[0].batch_size] == [captured]
    buffer = backend.cuda_graph_kv_indices[0]
    assert captured._paged_kv_indices_buf is buffer
    assert torch.equal(buffer, captured.plan["indices"])
    built = lists(captured.plan)
    assert built[: len(setting.live)] == as_ints(setting.live)
    assert [len(slots) for slots in built[len(setting.live) :]] == [1, 1]  # padding
    same_plan(captured.plan, stock.decode_cuda_graph_metadata[views[1].batch_size][0].plan)


@pytest.mark.parametrize("page_size", PAGES)
def test_one_graph_is_replayed_while_rows_grow_and_lose_more(page_size: int) -> None:
    setting = pruned("decode", page_size)
    backend = ours(setting)
    size = len(setting.live) + 2
    capture(backend, size)
    (captured,) = backend.decode_cuda_graph_metadata[size]
    for event in EVENTS:
        setting.decode_more(event)
        backend.init_forward_metadata_out_graph(replay_view(setting))
        assert backend.decode_cuda_graph_metadata[size] == [captured]
        built = lists(captured.plan)
        assert built[:-2] == as_ints(setting.live) and [len(slots) for slots in built[-2:]] == [1, 1]
        assert captured.plan["host"].diff().tolist() == [len(slots) for slots in built]
        end = captured.plan["kv"][-1]
        assert torch.equal(backend.cuda_graph_kv_indices[0][:end], captured.plan["indices"][:end])


def test_prefill_and_decode_backends_of_their_own_both_see_the_views() -> None:
    setting = pruned("decode", 1)
    parts = [ATTENTION_BACKENDS[name](setting.runner) for name in ("flashinfer", "triton")]
    both = HybridAttnBackend(setting.runner, *parts)
    live_backends.attach_views(both, setting.views)
    assert all(part.views is setting.views for part in parts)
    with pytest.raises(RuntimeError, match="SimpleNamespace does not read live views"):
        live_backends.attach_views(SimpleNamespace(), setting.views)


def test_an_fp4_cache_is_refused() -> None:
    setting = pruned("decode", 1)
    backend = FlashInferAttnBackend(setting.runner)
    backend.prefill_uses_dequant_workspace = True
    (reason,) = live_backends.unsupported("flashinfer", backend, [])
    assert "--kv-cache-dtype auto" in reason
