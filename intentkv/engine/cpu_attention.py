"""The `intentkv_cpu` attention backend: SGLang's CPU attention by way of `kernels.attention` and the live views.

Every forward turns each request's row into one list of slots, once for all layers. A request with holes gets the list of its
live view, so dropped positions are neither read nor counted; any other request gets its row, as stock backends do.
"""

from typing import Any

import torch
from sglang.srt.layers.attention.base_attn_backend import AttentionBackend
from sglang.srt.layers.radix_attention import AttentionType, RadixAttention
from sglang.srt.mem_cache.memory_pool import KVWriteLoc

from intentkv.apply.live_view import LiveViews
from intentkv.errors import SettingsError
from intentkv.kernels.attention import paged_attention


class CpuAttentionBackend(AttentionBackend):
    """Decode, prefill, chunked prefill and mixed batches of decoder-only models, any page size.

    Attributes:
        views: the holes of the rows of `runner.req_to_token_pool`; None reads every row as stock does.
        lse: `[T, H_q]` float32, log-sum-exp of the layer that ran last.
    """

    views: LiveViews | None = None
    lse: torch.Tensor | None = None

    def __init__(self, runner: Any) -> None:
        super().__init__()
        layers = [module for module in runner.model.modules() if isinstance(module, RadixAttention)]
        reasons = unsupported(layers, runner.token_to_kv_pool.dtype, runner.dtype)
        if reasons:
            raise SettingsError(reasons)
        self.req_to_token = runner.req_to_token_pool.req_to_token
        self.pool = runner.token_to_kv_pool
        self._slots: list[torch.Tensor] = []
        self._query_lens: list[int] = []

    def init_forward_metadata(self, forward_batch: Any) -> None:
        """Build the slot lists of this forward from `forward_batch` and the rows as they stand now."""
        mode = forward_batch.forward_mode
        rows = [] if mode.is_idle() else forward_batch.req_pool_indices.tolist()
        seq_lens = [] if mode.is_idle() else forward_batch.seq_lens.tolist()
        self._query_lens = [1] * len(rows) if mode.is_decode_or_idle() else forward_batch.extend_seq_lens.tolist()
        self._slots = [self._read(*request) for request in zip(rows, seq_lens, self._query_lens, strict=True)]

    def _read(self, row: int, seq_len: int, query_len: int) -> torch.Tensor:
        """Slots of one request, `[live]` int64. The tokens being computed now always see each other: a drop counts from the
        forward after the one that computed the position."""
        if self.views is None:
            return self.req_to_token[row, :seq_len].to(torch.int64)
        computed = self.req_to_token[row, seq_len - query_len : seq_len].to(torch.int64)
        return torch.cat((self.views.slots(row, seq_len - query_len), computed))

    def forward_decode(
        self,
        q: torch.Tensor,
        k: torch.Tensor | None,
        v: torch.Tensor | None,
        layer: RadixAttention,
        forward_batch: Any,
        save_kv_cache: bool = True,
        **kwargs: Any,
    ) -> torch.Tensor:
        """Write this step's `k` and `v` `[T, H_kv, D]` into the pool, then attend `q` `[T, H_q * D]`; returns its shape.

        Rows of `q` past the batch (padding for data-parallel peers) come back as zeros.
        """
        if save_kv_cache and k is not None and v is not None:
            self.pool.set_kv_buffer(layer, KVWriteLoc(forward_batch.out_cache_loc), k, v)
        query = q.reshape(-1, layer.tp_q_head_num, layer.qk_head_dim)
        real = sum(self._query_lens)
        keys, values = self.pool.get_kv_buffer(layer.layer_id)
        output, self.lse = paged_attention(query[:real], keys, values, self._slots, self._query_lens, layer.scaling)
        if real < len(query):
            output = torch.cat((output, output.new_zeros(len(query) - real, *output.shape[1:])))
        return output.flatten(1)

    # Extend differs from decode only in the slot lists and query lengths that init_forward_metadata built.
    forward_extend = forward_decode

    def get_cuda_graph_seq_len_fill_value(self) -> int:
        """Length of the requests that pad a batch; SGLang asks for it with graphs off as well."""
        return 1

    def support_triton(self) -> bool:
        return False


def unsupported(layers: list[RadixAttention], kv_dtype: torch.dtype, dtype: torch.dtype) -> list[str]:
    """Reasons, one a line, why this backend cannot serve a model with these attention layers; empty if it can."""
    reasons = []
    remedy = "serve it with --attention-backend torch_native"
    if kv_dtype != dtype:
        reasons.append(
            f"intentkv_cpu reads the KV cache in the model's dtype {dtype}, not {kv_dtype}: leave --kv-cache-dtype auto"
        )
    if any(layer.sliding_window_size > -1 for layer in layers):
        reasons.append(f"intentkv_cpu has no sliding-window attention: {remedy}")
    if any(layer.logit_cap for layer in layers):
        reasons.append(f"intentkv_cpu has no logit capping: {remedy}")
    if any(layer.is_cross_attention or layer.attn_type != AttentionType.DECODER for layer in layers):
        reasons.append(f"intentkv_cpu has no cross attention or bidirectional attention: {remedy}")
    if any(layer.qk_head_dim != layer.v_head_dim for layer in layers):
        reasons.append(f"intentkv_cpu needs keys and values of one head size: {remedy}")
    return reasons


def create_backend(runner: Any) -> CpuAttentionBackend:
    """Factory for SGLang's attention registry."""
    return CpuAttentionBackend(runner)
