"""SGLang's FA3 backend with live views. Real: the class, its page tables, its page-table kernel in the interpreter.

Stand-in: `sgl_kernel`, which loads only beside a CUDA driver. The backend takes three attention functions and the scheduler's
metadata from it; none of them takes part in building page tables, so the stand-ins only have to exist.

Run by `test_live_view_backends.py` in a process of its own.
"""

from __future__ import annotations

import sys
import types
from typing import Any

import pytest
import torch


def _without_cuda() -> None:
    def scheduler_metadata(cache_seqlens: torch.Tensor, **sizes: Any) -> torch.Tensor:
        return torch.cat((torch.tensor([sizes["max_seqlen_k"]], dtype=torch.int32), cache_seqlens))

    flash = types.ModuleType("sgl_kernel.flash_attn")
    flash.flash_attn_varlen_func = flash.flash_attn_with_kvcache = None  # type: ignore[attr-defined]
    flash.get_scheduler_metadata = scheduler_metadata  # type: ignore[attr-defined]
    package = types.ModuleType("sgl_kernel")
    package.merge_state_v2, package.flash_attn, package.__path__ = None, flash, []  # type: ignore[attr-defined]
    sys.modules |= {"sgl_kernel": package, "sgl_kernel.flash_attn": flash}


_without_cuda()

from sglang.srt.layers.attention.flashattention_backend import FlashAttentionBackend

from intentkv.engine import live_backends
from tests.kernels.host import CONTEXT
from tests.views.setting import (
    CASES,
    EVENTS,
    PAGES,
    Setting,
    capture,
    compacted,
    pruned,
    replay_view,
    same_metadata,
)


def ours(setting: Setting) -> FlashAttentionBackend:
    # Past the factory of the registry, which asks the GPU for its architecture.
    backend = live_backends.create_backend("fa3", FlashAttentionBackend, setting.runner)
    assert live_backends.reads_whole_pages(backend), "its page table has no room for a part of a page"
    live_backends.attach_views(backend, setting.views)
    return backend


def slots_of(table: torch.Tensor, lens: torch.Tensor, page_size: int) -> list[torch.Tensor]:
    """The slots that a page table and lengths stand for."""
    slots = table.long()[:, :, None] * page_size + torch.arange(page_size)
    return [row.flatten()[:n] for row, n in zip(slots, lens.tolist())]


@pytest.mark.parametrize("page_size", PAGES)
@pytest.mark.parametrize("case", CASES)
def test_eager_metadata(case: str, page_size: int) -> None:
    setting = pruned(case, page_size)
    backend = ours(setting)
    backend.init_forward_metadata(setting.batch)
    made = backend.forward_metadata
    live = [len(slots) for slots in setting.live]
    assert made.cache_seqlens_int32.tolist() == live
    assert made.cu_seqlens_k.diff().tolist() == live
    assert made.cu_seqlens_q.diff().tolist() == setting.new
    assert made.max_seq_len_k == max(live)
    built = slots_of(made.page_table, made.cache_seqlens_int32, page_size)
    assert [slots.tolist() for slots in built] == [slots.tolist() for slots in setting.live]

    short = compacted(setting)
    stock = FlashAttentionBackend(short.runner)
    stock.init_forward_metadata(short.batch)
    compared = same_metadata(made, stock.forward_metadata)
    assert {"page_table", "cache_seqlens_int32", "cu_seqlens_q", "cu_seqlens_k"} <= set(compared)
    assert ("scheduler_metadata" in compared) == (case == "decode")

    q, _, _ = setting.host.qkv(len(setting.batch.input_ids))
    torch.testing.assert_close(setting.through(q, built), setting.exact(q), rtol=0, atol=1e-12)


@pytest.mark.parametrize("page_size", PAGES)
def test_a_replayed_decode_graph_finds_live_rows_in_the_captured_buffers(page_size: int) -> None:
    setting = pruned("decode", page_size)
    short = compacted(setting)
    backend, stock = ours(setting), FlashAttentionBackend(short.runner)
    views = (replay_view(setting), replay_view(short))
    running, setting.views.running = setting.views.running, None
    for each, shown in zip((backend, stock), views):
        each.init_cuda_graph_state(8, 8)
        each.init_forward_metadata_out_graph(shown, in_capture=True)
    captured = backend.forward_metadata
    addresses = [getattr(captured, name).data_ptr() for name in ("page_table", "cache_seqlens_int32", "cu_seqlens_k")]
    setting.views.running = running
    for each, shown in zip((backend, stock), views):
        each.decode_cuda_graph_metadata["page_table"].fill_(-1)
        each.init_forward_metadata_out_graph(shown)

    made = backend.forward_metadata
    assert [getattr(made, n).data_ptr() for n in ("page_table", "cache_seqlens_int32", "cu_seqlens_k")] == addresses
    built = slots_of(made.page_table, made.cache_seqlens_int32, page_size)
    assert [slots.tolist() for slots in built[: len(setting.live)]] == [slots.tolist() for slots in setting.live]
    assert [len(slots) for slots in built[len(setting.live) :]] == [1, 1]  # padding
    assert {"page_table", "cache_seqlens_int32", "cu_seqlens_k"} <= set(same_metadata(made, stock.forward_metadata))


@pytest.mark.parametrize("page_size", PAGES)
def test_one_graph_is_replayed_while_rows_grow_and_lose_more(page_size: int) -> None:
    setting = pruned("decode", page_size)
    backend = ours(setting)
    capture(backend, len(setting.live) + 2)
    captured = backend.forward_metadata
    for event in EVENTS:
        setting.decode_more(event)
        backend.init_forward_metadata_out_graph(replay_view(setting))
        made = backend.forward_metadata
        assert made is captured
        live = [len(slots) for slots in setting.live]
        assert made.cache_seqlens_int32.tolist() == made.cu_seqlens_k.diff().tolist() == [*live, 1, 1]
        built = slots_of(made.page_table, made.cache_seqlens_int32, page_size)
        assert [slots.tolist() for slots in built[:-2]] == [slots.tolist() for slots in setting.live]


def test_the_captured_lengths_bound_what_a_replay_may_need() -> None:
    """Graphs are captured for the whole context, so a row that gets shorter or longer stays inside their buffers."""
    setting = pruned("decode", 1)
    backend = ours(setting)
    backend.init_cuda_graph_state(8, 8)
    assert backend.decode_cuda_graph_metadata["page_table"].shape[1] == CONTEXT
