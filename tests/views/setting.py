"""Batches of pruned and unpruned requests on SGLang's real pools and translator, for the real attention backends on a CPU.

`pruned` has tombstones in its rows and live views beside them. `compacted` is the same batch as stock SGLang would see it had
the dropped positions never existed: rows written short by hand, over the same KV pool. Whatever a stock backend builds for
the second is what ours must build for the first.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
import transformers
from sglang.srt.configs.model_config import AttentionArch
from sglang.srt.mem_cache.kv_index_translator import KVIndexTranslator
from sglang.srt.mem_cache.memory_pool import ReqToTokenPool
from sglang.srt.model_executor.forward_batch_info import ForwardBatch, ForwardMode
from sglang.srt.model_executor.runner.decode_cuda_graph_runner import build_replay_fb_view
from sglang.srt.runtime_context import get_parallel, get_server_args

from intentkv.apply.live_view import LiveViews
from intentkv.kernels.reference import paged_attention_reference
from tests.host.pools import publish_settings
from tests.kernels.host import CONTEXT, DIM, H_KV, H_Q, Host

publish_settings()
get_parallel().override_permanently(attn_dcp_rank=0)

ROWS = (3, 1, 6, 2)  # neither sorted nor all
LENGTHS = (100, 37, 130, 64)
NEW = (6, 3, 1, 9)
HOLES = {0: slice(4, 60), 2: slice(0, 100)}  # request -> where positions are dropped; requests 1 and 3 have no holes
ROOM = 4  # tokens that a request may still get
CASES = ("decode", "extend")
# Events between replays of one graph: by request what is dropped, nothing, and at last all holes are gone.
EVENTS: tuple[dict[int, range] | None, ...] = ({0: range(64, 80), 1: range(16, 32)}, {}, {2: range(96, 128)}, None)
PAGES = (1, 16)


@dataclass
class Setting:
    """One batch.

    Attributes:
        runner: what a backend reads of its model runner.
        batch: the forward.
        views: None where no row has holes.
        full: slots of every request before anything was dropped, `[n]` int64 each.
        dropped: `[n]` Boolean each.
        room: slots of every request and of the tokens that it may still get, `[n + ROOM]` int64 each.
    """

    host: Host
    runner: SimpleNamespace
    batch: ForwardBatch
    views: LiveViews | None
    full: list[torch.Tensor]
    dropped: list[torch.Tensor]
    room: list[torch.Tensor] = dataclasses.field(default_factory=list)

    def decode_more(self, holes: dict[int, range] | None) -> None:
        """Go on by a decode step of every request, after an event that drops `holes` of some; None forgets all holes."""
        page = self.host.page_size
        for lane, row in enumerate(ROWS):
            length = len(self.full[lane])
            mask = torch.zeros(length, dtype=torch.bool)
            if holes is not None:
                more = [n for n in holes.get(lane, ()) if (n // page + 1) * page <= length - 1]
                mask = self.dropped[lane].index_fill(0, torch.tensor(more, dtype=torch.int64), True)
            gone = mask.nonzero()[:, 0]
            self.views.set_holes(row, gone.numpy(), length)
            self.host.rows.write((row, slice(0, length + 1)), self.room[lane][: length + 1].int())
            self.host.rows.write((row, gone), (gone % page).int())
            self.full[lane] = self.room[lane][: length + 1]
            self.dropped[lane] = torch.cat((mask, torch.zeros(1, dtype=torch.bool)))
        self.batch = _batch("decode", self.full, [len(slots) for slots in self.full])

    @property
    def new(self) -> list[int]:
        return [1] * len(ROWS) if self.batch.forward_mode.is_decode() else list(NEW)

    @property
    def live(self) -> list[torch.Tensor]:
        """Slots that attention has to read with this forward's own tokens, `[live]` int64 each."""
        return [slots[~mask] for slots, mask in zip(self.full, self.dropped, strict=True)]

    @property
    def prefix(self) -> list[torch.Tensor]:
        """The live slots computed before this forward, `[live - new]` int64 each."""
        return [slots[: len(slots) - new] for slots, new in zip(self.live, self.new, strict=True)]

    def exact(self, query: torch.Tensor) -> torch.Tensor:
        """Full attention with -inf at the dropped positions, float64 `[T, H_q * D]`."""
        keys, values = self.host.pool.get_kv_buffer(0)
        out, _ = paged_attention_reference(
            query.view(-1, H_Q, DIM), keys, values, self.full, self.new, DIM**-0.5, self.dropped
        )
        return out.flatten(1)

    def through(self, query: torch.Tensor, slots: list[torch.Tensor]) -> torch.Tensor:
        """Attention over lists of slots as they were built, float64 `[T, H_q * D]`."""
        keys, values = self.host.pool.get_kv_buffer(0)
        out, _ = paged_attention_reference(query.view(-1, H_Q, DIM), keys, values, slots, self.new, DIM**-0.5)
        return out.flatten(1)


def pruned(case: str, page_size: int, dtype: torch.dtype = torch.float32, whole_pages: bool = True) -> Setting:
    """A batch of four requests, two of them with holes. Float32, because Triton's interpreter has no bfloat16 products.

    Holes are whole pages, as for FA3, or single positions for backends that read slots.
    """
    host = Host(page_size, dtype)
    full, dropped, room = [], [], []
    views = LiveViews(host.rows.req_to_token)
    for lane, (row, length) in enumerate(zip(ROWS, LENGTHS, strict=True)):
        host.fill_row(row, length + ROOM)
        room.append(host.rows.req_to_token[row, : length + ROOM].long())
        host.rows.write((row, slice(length, length + ROOM)), torch.zeros(ROOM, dtype=torch.int32))
        full.append(room[-1][:length])
        holes = _holes(lane, length - NEW[lane], page_size if whole_pages else 1)
        mask = torch.zeros(length, dtype=torch.bool)
        mask[holes] = True
        dropped.append(mask)
        views.set_holes(row, holes, length - NEW[lane])
        host.rows.write((row, torch.from_numpy(holes)), torch.from_numpy(holes % page_size).int())
    views.running = np.array(ROWS)
    return Setting(host, runner_of(host, host.rows), _batch(case, full, list(LENGTHS)), views, full, dropped, room)


def compacted(setting: Setting) -> Setting:
    """The same batch with short rows, in a table of their own over the same KV pool."""
    rows = ReqToTokenPool(8, CONTEXT, "cpu", enable_memory_saver=False)
    for row, slots in zip(ROWS, setting.live, strict=True):
        rows.write((row, slice(0, len(slots))), slots.int())
    case = "decode" if setting.batch.forward_mode.is_decode() else "extend"
    none = [torch.zeros(len(slots), dtype=torch.bool) for slots in setting.live]
    batch = _batch(case, setting.live, [len(slots) for slots in setting.live])
    return Setting(setting.host, runner_of(setting.host, rows), batch, None, setting.live, none)


def replay_view(setting: Setting, padding: int = 2) -> Any:
    """What a captured decode graph hands the backend: SGLang's own view, padded with requests of row 0 and length 1."""
    batch, count = setting.batch, len(ROWS)

    def pad(lens: torch.Tensor, value: int) -> torch.Tensor:
        return torch.cat((lens, torch.full((padding,), value, dtype=lens.dtype)))

    buffers = SimpleNamespace(
        input_ids=torch.zeros(count + padding, dtype=torch.int64),
        positions=pad(batch.seq_lens - 1, 0),
        req_pool_indices=pad(batch.req_pool_indices, 0),
        seq_lens=pad(batch.seq_lens, 1),
        seq_lens_cpu=pad(batch.seq_lens_cpu, 1),
        mamba_track_indices=None,
    )
    return build_replay_fb_view(
        batch, buffers, count + padding, count, count + padding, None, 1, ForwardMode.DECODE, is_encoder_decoder=False
    )


def capture(backend: Any, size: int) -> None:
    """Capture as SGLang does: a batch of `size` requests of row 0 and length 1, and no forward of ours."""
    ones, zeros = torch.ones(size, dtype=torch.int64), torch.zeros(size, dtype=torch.int64)
    batch = ForwardBatch(
        forward_mode=ForwardMode.DECODE,
        batch_size=size,
        input_ids=zeros,
        req_pool_indices=zeros,
        seq_lens=ones,
        seq_lens_cpu=ones.clone(),
        seq_lens_sum=size,
        out_cache_loc=zeros,
    )
    batch.positions = zeros
    running, backend.views.running = backend.views.running, None
    backend.init_cuda_graph_state(8, 8)
    backend.init_forward_metadata_out_graph(batch, in_capture=True)
    backend.views.running = running


def same_metadata(ours: Any, stock: Any) -> list[str]:
    """Compares two metadata objects of one kind; returns the names of the fields that were tensors, all equal."""
    assert type(ours) is type(stock)
    compared = []
    for field in dataclasses.fields(ours):
        a, b = getattr(ours, field.name), getattr(stock, field.name)
        if isinstance(a, torch.Tensor) and not a.is_floating_point():
            assert a.dtype == b.dtype and torch.equal(a, b), field.name
            compared.append(field.name)
        elif not isinstance(a, torch.Tensor):
            assert a == b, field.name
    return compared


def runner_of(host: Host, rows: ReqToTokenPool) -> SimpleNamespace:
    allocator = SimpleNamespace(get_kvcache=lambda: host.pool)
    model = SimpleNamespace(
        attention_arch=AttentionArch.MHA,
        num_attention_heads=H_Q,
        get_max_num_attention_heads=lambda: H_Q,
        get_num_kv_heads=lambda *sizes: H_KV,
        head_dim=DIM,
        v_head_dim=DIM,
        swa_v_head_dim=DIM,
        context_len=CONTEXT,
        is_encoder_decoder=False,
        is_local_attention_model=False,
        is_multimodal=False,
        hf_config=transformers.Qwen3Config(architectures=["Qwen3ForCausalLM"]),
        hf_text_config=SimpleNamespace(num_attention_heads=H_Q),
        linear_attn_registry_result=None,
    )
    return SimpleNamespace(
        model=torch.nn.ModuleList([host.layer]),
        model_config=model,
        server_args=get_server_args(),
        dtype=host.dtype,
        kv_cache_dtype=host.dtype,
        kv_cache_dtype_str="auto",
        device="cpu",
        gpu_id=0,
        page_size=host.page_size,
        sliding_window_size=None,
        is_draft_worker=False,
        spec_algorithm=None,
        decode_num_tokens_per_req=lambda: 1,
        prefill_attention_backend_str="flashinfer",
        decode_attention_backend_str="flashinfer",
        use_mla_backend=False,
        init_new_workspace=False,
        req_to_token_pool=rows,
        token_to_kv_pool=host.pool,
        token_to_kv_pool_allocator=allocator,
        kv_index_translator=KVIndexTranslator(
            req_to_token=rows.req_to_token,
            token_to_kv_pool_allocator=allocator,
            token_to_kv_pool=host.pool,
            page_size=host.page_size,
            device="cpu",
        ),
    )


def _holes(lane: int, before: int, page_size: int) -> np.ndarray:
    """Dropped positions of a request that had `before` tokens: half of the whole pages of its slice, at random."""
    if lane not in HOLES:
        return np.empty(0, np.int64)
    pages = np.arange(before // page_size)
    pages = pages[(pages * page_size >= HOLES[lane].start) & ((pages + 1) * page_size <= HOLES[lane].stop)]
    gone = np.sort(np.random.default_rng(lane).choice(pages, -(-len(pages) // 2), replace=False))
    return (gone[:, None] * page_size + np.arange(page_size)).ravel()


def _batch(case: str, slots: list[torch.Tensor], lengths: list[int]) -> ForwardBatch:
    """A forward as the scheduler makes it: the last token of every request, or its last `NEW` ones."""
    new = [1] * len(ROWS) if case == "decode" else list(NEW)
    lens = torch.tensor(lengths)
    batch = ForwardBatch(
        forward_mode=ForwardMode.DECODE if case == "decode" else ForwardMode.EXTEND,
        batch_size=len(ROWS),
        input_ids=torch.zeros(sum(new), dtype=torch.int64),
        req_pool_indices=torch.tensor(ROWS),
        seq_lens=lens,
        seq_lens_cpu=lens.clone(),
        seq_lens_sum=sum(lengths),
        out_cache_loc=torch.cat([s[len(s) - n :] for s, n in zip(slots, new, strict=True)]),
    )
    batch.positions = torch.cat([torch.arange(n - t, n) for n, t in zip(lengths, new, strict=True)])
    if case == "extend":
        prefix = [n - t for n, t in zip(lengths, new, strict=True)]
        batch.extend_seq_lens, batch.extend_seq_lens_cpu = torch.tensor(new, dtype=torch.int32), new
        batch.extend_prefix_lens, batch.extend_prefix_lens_cpu = torch.tensor(prefix, dtype=torch.int32), prefix
        batch.extend_num_tokens = sum(new)
    return batch
