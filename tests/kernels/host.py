"""Real SGLang pools, layers and batches for the backend tests, filled with random tokens."""

from types import SimpleNamespace

import torch
from sglang.srt.layers.radix_attention import RadixAttention
from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool, ReqToTokenPool
from sglang.srt.model_executor.forward_batch_info import ForwardBatch, ForwardMode

H_Q, H_KV, DIM, POOL, CONTEXT = 9, 3, 64, 1024, 256


class Host:
    """One layer's KV pool with random contents, rows of shuffled pages, and page 0 full of NaN."""

    def __init__(self, page_size: int = 1, dtype: torch.dtype = torch.bfloat16, **layer_settings) -> None:
        torch.manual_seed(0)
        self.page_size = page_size
        self.dtype = dtype
        self.layer = RadixAttention(H_Q, DIM, DIM**-0.5, H_KV, layer_id=0, **layer_settings)
        self.rows = ReqToTokenPool(8, CONTEXT, "cpu", enable_memory_saver=False)
        self.pool = MHATokenToKVPool(POOL, page_size, dtype, H_KV, DIM, 1, "cpu", enable_memory_saver=False)
        for buffer in (*self.pool.k_buffer, *self.pool.v_buffer):
            buffer.copy_(torch.randn(buffer.shape))
            buffer[:page_size] = float("nan")
        self._pages = (torch.randperm(POOL // page_size) + 1).tolist()

    @property
    def runner(self) -> SimpleNamespace:
        """What an attention backend reads of its model runner."""
        return SimpleNamespace(
            model=torch.nn.ModuleList([self.layer]),
            dtype=self.dtype,
            device="cpu",
            req_to_token_pool=self.rows,
            token_to_kv_pool=self.pool,
        )

    def fill_row(self, row: int, length: int) -> None:
        """Give `row` the slots of fresh pages for `length` positions."""
        pages = [self._pages.pop() for _ in range(-(-length // self.page_size))]
        slots = torch.tensor(pages)[:, None] * self.page_size + torch.arange(self.page_size)
        self.rows.write((row, slice(0, length)), slots.flatten()[:length].int())

    def batch(self, seq_lens: list[int], extend_lens: list[int] | None = None) -> ForwardBatch:
        """A forward over rows 1, 2, ... of these lengths: a decode step, or an extend by the last `extend_lens` tokens."""
        lens = torch.tensor(seq_lens, dtype=torch.int64)
        new = torch.tensor(extend_lens or [1] * len(seq_lens), dtype=torch.int64)
        row_of = range(1, len(seq_lens) + 1)
        written = [self.rows.req_to_token[r, n - t : n] for r, n, t in zip(row_of, seq_lens, new.tolist())]
        batch = ForwardBatch(
            forward_mode=ForwardMode.EXTEND if extend_lens else ForwardMode.DECODE,
            batch_size=len(seq_lens),
            input_ids=torch.zeros(int(new.sum()), dtype=torch.int64),
            req_pool_indices=torch.tensor(list(row_of), dtype=torch.int64),
            seq_lens=lens,
            out_cache_loc=torch.cat(written).long() if written else torch.zeros(0, dtype=torch.int64),
            seq_lens_sum=sum(seq_lens),
        )
        if extend_lens:
            batch.extend_seq_lens, batch.extend_prefix_lens = new, lens - new
        return batch

    def qkv(self, tokens: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Random `[T, H_q * D]`, `[T, H_kv, D]`, `[T, H_kv, D]`."""
        shapes = ((tokens, H_Q * DIM), (tokens, H_KV, DIM), (tokens, H_KV, DIM))
        q, k, v = (torch.randn(shape).to(self.dtype) for shape in shapes)
        return q, k, v
