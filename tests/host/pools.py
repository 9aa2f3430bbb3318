"""SGLang's host classes as its scheduler builds them, on the CPU and without a model."""

from __future__ import annotations

import torch
from sglang.srt.mem_cache.allocator.paged import PagedTokenToKVPoolAllocator
from sglang.srt.mem_cache.allocator.token import TokenToKVPoolAllocator
from sglang.srt.mem_cache.cache_init_params import CacheInitParams
from sglang.srt.mem_cache.memory_pool import ReqToTokenPool
from sglang.srt.mem_cache.unified_cache.component_type import ComponentType
from sglang.srt.mem_cache.unified_radix_cache import UnifiedRadixCache
from sglang.srt.runtime_context import get_context


def publish_settings() -> None:
    """Give SGLang the process-wide settings its host classes read."""
    get_context().override_server_args(attention_backend="torch_native", device="cpu").install()


def build_allocator(page_size: int, size: int, need_sort: bool) -> TokenToKVPoolAllocator | PagedTokenToKVPoolAllocator:
    """An allocator for `size` tokens in pages, which hands out slots but has no KV behind them."""
    if page_size == 1:
        return TokenToKVPoolAllocator(size, torch.bfloat16, "cpu", None, need_sort)
    return PagedTokenToKVPoolAllocator(size, page_size, torch.bfloat16, "cpu", None, need_sort)


def build_cache(
    cache_class: type[UnifiedRadixCache],
    core: str,
    page_size: int,
    size: int,
    context: int,
    max_requests: int,
    need_sort: bool,
) -> UnifiedRadixCache:
    """A radix cache with its own pools."""
    return cache_class(
        CacheInitParams(
            disable=False,
            req_to_token_pool=ReqToTokenPool(max_requests, context, "cpu", False),
            token_to_kv_pool_allocator=build_allocator(page_size, size, need_sort),
            page_size=page_size,
            tree_components=(ComponentType.FULL,),
            tree_core_backend=core,
        )
    )
