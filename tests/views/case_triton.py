"""SGLang's Triton backend with live views, all of it real: class, index kernels and attention kernels, in the interpreter.

Run by `test_live_view_backends.py` in a process of its own, because Triton reads TRITON_INTERPRET when it is imported.
"""

from __future__ import annotations

import itertools

import pytest
import torch
from sglang.srt.layers.attention.attention_registry import ATTENTION_BACKENDS
from sglang.srt.layers.attention.triton_backend import TritonAttnBackend

from intentkv.engine import live_backends
from tests.kernels.host import Host
from tests.views.setting import CASES, EVENTS, PAGES, Setting, capture, compacted, pruned, replay_view, same_metadata

live_backends.register()


def ours(setting: Setting) -> TritonAttnBackend:
    backend = ATTENTION_BACKENDS["triton"](setting.runner)
    assert isinstance(backend, TritonAttnBackend) and type(backend).__name__ == "LiveTritonAttnBackend"
    live_backends.attach_views(backend, setting.views)
    return with_cores(backend)


def with_cores(backend: TritonAttnBackend) -> TritonAttnBackend:
    backend.device_core_count = 8  # a CPU has none, and the kernel that splits long requests would not run
    return backend


def lists(indptr: torch.Tensor, indices: torch.Tensor) -> list[torch.Tensor]:
    return [indices[a:b] for a, b in itertools.pairwise(indptr.tolist())]


@pytest.mark.parametrize("page_size", PAGES)
@pytest.mark.parametrize("case", CASES)
def test_eager_metadata(case: str, page_size: int) -> None:
    setting = pruned(case, page_size, whole_pages=False)
    backend = ours(setting)
    backend.init_forward_metadata(setting.batch)
    built = lists(backend.forward_metadata.kv_indptr, backend.forward_metadata.kv_indices)
    # Triton attends the tokens of an extend from their own keys and values, so its lists end before them.
    expected = setting.live if case == "decode" else setting.prefix
    assert [slots.tolist() for slots in built] == [slots.tolist() for slots in expected]

    short = compacted(setting)
    stock = with_cores(TritonAttnBackend(short.runner))
    stock.init_forward_metadata(short.batch)
    compared = same_metadata(backend.forward_metadata, stock.forward_metadata)
    assert {"kv_indptr", "kv_indices"} | ({"num_kv_splits"} if case == "decode" else {"qo_indptr"}) <= set(compared)

    q, _, _ = setting.host.qkv(len(setting.batch.input_ids))
    own = setting.full if case == "extend" else [slots[:0] for slots in setting.full]
    slots = [torch.cat((a, b[len(b) - n :])) if n and len(b) else a for a, b, n in zip(built, own, setting.new)]
    torch.testing.assert_close(setting.through(q, slots), setting.exact(q), rtol=0, atol=1e-12)


@pytest.mark.parametrize("page_size", PAGES)
@pytest.mark.parametrize("case", CASES)
def test_the_real_kernels_attend_what_is_live(case: str, page_size: int) -> None:
    setting = pruned(case, page_size, whole_pages=False)
    short = compacted(setting)
    qkv = setting.host.qkv(len(setting.batch.input_ids))
    outputs = []
    for backend, batch in ((ours(setting), setting.batch), (with_cores(TritonAttnBackend(short.runner)), short.batch)):
        backend.init_forward_metadata(batch)
        outputs.append(backend.forward(*qkv, setting.host.layer, batch))
    assert torch.equal(*outputs)
    # Page 0, which every tombstone names, is NaN: had one been read, nothing would be close to anything.
    torch.testing.assert_close(outputs[0].double(), setting.exact(qkv[0]), rtol=0, atol=1e-5)


@pytest.mark.parametrize("page_size", PAGES)
def test_a_replayed_graph_finds_live_rows_in_the_captured_buffers(page_size: int) -> None:
    setting = pruned("decode", page_size)
    backend, view = ours(setting), replay_view(setting)
    short = compacted(setting)
    stock, short_view = with_cores(TritonAttnBackend(short.runner)), replay_view(short)
    running, setting.views.running = setting.views.running, None
    for each, shown in ((backend, view), (stock, short_view)):
        each.init_cuda_graph_state(8, 8)
        each.init_forward_metadata_out_graph(shown, in_capture=True)
    captured = backend.forward_metadata
    setting.views.running = running
    for each, shown in ((backend, view), (stock, short_view)):
        each.cuda_graph_kv_indices.fill_(-1)
        each.init_forward_metadata_out_graph(shown)

    assert backend.forward_metadata is captured  # same objects, so the same addresses as the graph has
    assert captured.kv_indices is backend.cuda_graph_kv_indices
    built = lists(captured.kv_indptr, captured.kv_indices)
    assert [slots.tolist() for slots in built[: len(setting.live)]] == [slots.tolist() for slots in setting.live]
    assert [len(slots) for slots in built[len(setting.live) :]] == [1, 1]  # padding
    assert {"kv_indptr", "kv_indices", "num_kv_splits"} <= set(same_metadata(captured, stock.forward_metadata))


@pytest.mark.parametrize("page_size", PAGES)
def test_one_graph_is_replayed_while_rows_grow_and_lose_more(page_size: int) -> None:
    setting = pruned("decode", page_size)
    backend = ours(setting)
    capture(backend, len(setting.live) + 2)
    captured = backend.forward_metadata
    for event in EVENTS:
        setting.decode_more(event)
        backend.init_forward_metadata_out_graph(replay_view(setting))
        assert backend.forward_metadata is captured
        built = lists(captured.kv_indptr, captured.kv_indices)
        assert [slots.tolist() for slots in built[:-2]] == [slots.tolist() for slots in setting.live]
        assert [len(slots) for slots in built[-2:]] == [1, 1]
        short = compacted(setting)
        stock = with_cores(TritonAttnBackend(short.runner))
        stock.init_cuda_graph_state(8, 8)
        stock.init_forward_metadata_out_graph(replay_view(short), in_capture=True)
        assert torch.equal(captured.num_kv_splits, stock.forward_metadata.num_kv_splits)


def test_deterministic_extend_reads_the_same_prefix() -> None:
    setting = pruned("extend", 16)
    backend = ours(setting)
    qkv = setting.host.qkv(len(setting.batch.input_ids))
    backend.init_forward_metadata(setting.batch)
    usual = backend.forward(*qkv, setting.host.layer, setting.batch)
    backend.enable_deterministic = True
    torch.testing.assert_close(backend.forward(*qkv, setting.host.layer, setting.batch), usual, rtol=0, atol=1e-5)


def test_models_whose_attention_depends_on_positions_are_refused() -> None:
    setting = pruned("decode", 1)
    setting.runner.model = torch.nn.ModuleList([Host(sliding_window_size=128).layer])
    setting.runner.model[0].xai_temperature_len = 1024
    with pytest.raises(live_backends.SettingsError) as error:
        ATTENTION_BACKENDS["triton"](setting.runner)
    assert [word in reason for word, reason in zip(("sliding-window", "temperature"), error.value.reasons, strict=True)]
