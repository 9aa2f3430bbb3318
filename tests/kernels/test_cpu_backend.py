"""The real backend class on SGLang's real pools, beside SGLang's torch-native backend and float64."""

import numpy as np
import pytest
import torch
from sglang.srt.layers.attention.torch_native_backend import TorchNativeAttnBackend
from sglang.srt.model_executor.forward_batch_info import ForwardBatch, ForwardMode

from intentkv.apply.live_view import LiveViews
from intentkv.engine.cpu_attention import CpuAttentionBackend
from intentkv.errors import SettingsError
from intentkv.kernels.reference import paged_attention_reference
from tests.kernels.host import DIM, H_Q, Host
from tests.kernels.paged import rms

BATCHES = {
    "decode": ([70, 1, 33, 16], None),
    "prefill": ([40, 1, 33], [40, 1, 33]),
    "chunks": ([100, 64, 17], [30, 16, 1]),
    "mixed": ([70, 90, 20], [1, 58, 20]),
}


def forward(backend, batch: ForwardBatch, host: Host, qkv) -> torch.Tensor:
    backend.init_forward_metadata(batch)
    return backend.forward(*qkv, host.layer, batch)


@pytest.mark.parametrize("page_size", [1, 16])
@pytest.mark.parametrize("name", BATCHES)
def test_same_as_torch_native(name: str, page_size: int) -> None:
    seq_lens, extend_lens = BATCHES[name]
    host = Host(page_size)
    for i, length in enumerate(seq_lens):
        host.fill_row(i + 1, length)
    batch = host.batch(seq_lens, extend_lens)
    qkv = host.qkv(len(batch.input_ids))

    stock = forward(TorchNativeAttnBackend(host.runner), batch, host, qkv)
    ours = forward(CpuAttentionBackend(host.runner), batch, host, qkv)

    keys, values = host.pool.get_kv_buffer(0)
    slots = [host.rows.req_to_token[i + 1, :n].long() for i, n in enumerate(seq_lens)]
    query = qkv[0].view(-1, H_Q, DIM)
    exact, _ = paged_attention_reference(query, keys, values, slots, extend_lens or [1] * len(seq_lens), DIM**-0.5)
    assert ours.shape == stock.shape and ours.dtype == stock.dtype
    assert rms(ours - exact.flatten(1)) <= 2 * rms(stock - exact.flatten(1))


def test_new_keys_and_values_are_written_where_the_batch_says() -> None:
    host = Host()
    host.fill_row(1, 30)
    batch = host.batch([30], [4])
    before = host.pool.k_buffer[0].clone()
    q, k, v = host.qkv(4)
    backend = CpuAttentionBackend(host.runner)
    backend.init_forward_metadata(batch)

    backend.forward(q, k, v, host.layer, batch, save_kv_cache=False)
    assert torch.equal(host.pool.k_buffer[0][1:], before[1:])

    backend.forward(q, k, v, host.layer, batch)
    assert torch.equal(host.pool.k_buffer[0][batch.out_cache_loc], k)
    assert torch.equal(host.pool.v_buffer[0][batch.out_cache_loc], v)
    untouched = torch.ones(len(before), dtype=torch.bool)
    untouched[batch.out_cache_loc] = untouched[0] = False
    assert torch.equal(host.pool.k_buffer[0][untouched], before[untouched])


@pytest.mark.parametrize("page_size", [1, 16])
@pytest.mark.parametrize("extend_lens", [None, [1, 12]], ids=["decode", "extend"])
def test_a_pruned_row_is_masked_and_its_neighbour_untouched(extend_lens: list[int] | None, page_size: int) -> None:
    seq_lens, new = [90, 60], extend_lens or [1, 1]
    host = Host(page_size)
    for i, length in enumerate(seq_lens):
        host.fill_row(i + 1, length)
    full = [host.rows.req_to_token[i + 1, :n].long() for i, n in enumerate(seq_lens)]
    holes = np.sort(np.random.default_rng(0).choice(48, 30, replace=False))
    dropped = [torch.zeros(n, dtype=torch.bool) for n in seq_lens]
    dropped[1][holes] = True
    backend = CpuAttentionBackend(host.runner)
    backend.views = LiveViews(host.rows.req_to_token)
    backend.views.set_holes(2, holes, 48)
    host.rows.write((2, torch.from_numpy(holes)), torch.from_numpy(holes % page_size).int())
    batch = host.batch(seq_lens, extend_lens)
    qkv = host.qkv(sum(new))

    out = forward(backend, batch, host, qkv)

    query = qkv[0].view(-1, H_Q, DIM)
    exact, _ = paged_attention_reference(query, *host.pool.get_kv_buffer(0), full, new, DIM**-0.5, dropped)
    assert torch.isfinite(out).all()  # page 0, which every tombstone names, is NaN
    torch.testing.assert_close(out.double(), exact.flatten(1), rtol=0, atol=1e-2)
    backend.views.clear(2)
    first = host.batch(seq_lens[:1], extend_lens and extend_lens[:1])
    alone = forward(backend, first, host, [x[: new[0]] for x in qkv])
    assert torch.equal(out[: new[0]], alone)


def test_views_without_holes_change_no_bit() -> None:
    host = Host()
    host.fill_row(1, 50)
    batch, qkv = host.batch([50], [7]), host.qkv(7)
    backend = CpuAttentionBackend(host.runner)
    stock = forward(backend, batch, host, qkv)
    backend.views = LiveViews(host.rows.req_to_token)
    assert torch.equal(forward(backend, batch, host, qkv), stock)


def test_a_dropped_position_that_is_recomputed_counts_until_its_forward_is_over() -> None:
    host = Host()
    host.fill_row(1, 40)
    batch, qkv = host.batch([40], [10]), host.qkv(10)
    backend = CpuAttentionBackend(host.runner)
    stock = forward(backend, batch, host, qkv)
    backend.views = LiveViews(host.rows.req_to_token)
    backend.views.set_holes(1, np.array([32, 35]), 40)
    assert torch.equal(forward(backend, batch, host, qkv), stock)


def test_padding_rows_come_back_as_zeros() -> None:
    host = Host()
    host.fill_row(1, 20)
    batch = host.batch([20], [3])
    q, k, v = host.qkv(5)
    backend = CpuAttentionBackend(host.runner)
    backend.init_forward_metadata(batch)
    padded = backend.forward(q, k[:3], v[:3], host.layer, batch)
    assert padded.shape == q.shape and not padded[3:].any()
    assert torch.equal(padded[:3], backend.forward(q[:3], k[:3], v[:3], host.layer, batch))


def test_an_idle_batch_attends_nothing() -> None:
    host = Host()
    batch = host.batch([])
    batch.forward_mode = ForwardMode.IDLE
    assert forward(CpuAttentionBackend(host.runner), batch, host, host.qkv(0)).shape == (0, H_Q * DIM)


def test_every_reason_a_model_cannot_be_served_is_named() -> None:
    host = Host(dtype=torch.float16, logit_cap=30.0, sliding_window_size=128)
    runner = host.runner
    runner.dtype = torch.bfloat16
    with pytest.raises(SettingsError) as error:
        CpuAttentionBackend(runner)
    assert len(error.value.reasons) == 3
    for reason, word in zip(error.value.reasons, ["--kv-cache-dtype auto", "sliding-window", "logit capping"]):
        assert word in reason
