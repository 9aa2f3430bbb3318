"""The full count: every page of the pool has one owner, every row reads what it may read."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from intentkv.apply.rows import tombstones

if TYPE_CHECKING:
    from sglang.srt.managers.schedule_batch import Req

    from intentkv.engine.cache import IntentKVRadixCache


def audit(cache: IntentKVRadixCache) -> list[str]:
    """Compare free list, tree and rows with each other and with the ledger's book; what is wrong, one line each.

    Copies the pool's tables to the host: for tests and for an idle server, not for the scheduling loop.
    """
    allocator, page_size = cache.token_to_kv_pool_allocator, cache.page_size
    tree = cache.tree_core.all_values_flatten()
    faults = []
    private = {}
    for req in cache.running.values():
        filed = req.kv.cache_protected_len
        pages = _row(cache, req)[filed:].view(-1) // page_size
        private[f"request {req.rid}"] = torch.unique(pages)
        faults += _check_row(cache, req, np.unique(tree.cpu().numpy() // page_size))
    return faults + cache.ledger.audit(_free_pages(allocator), tree, private)


def _row(cache: IntentKVRadixCache, req: Req) -> torch.Tensor:
    return cache.req_to_token_pool.req_to_token[req.kv.req_pool_idx, : req.kv.kv_allocated_len].to(torch.int64)


def _check_row(cache: IntentKVRadixCache, req: Req, tree_pages: np.ndarray) -> list[str]:
    slots = _row(cache, req).cpu().numpy()
    row = cache.rows.get(req.kv.req_pool_idx)
    holes = row.holes if row is not None else np.empty(0, dtype=np.int64)
    live = np.ones(len(slots), dtype=bool)
    live[holes] = False
    faults = []
    if not np.array_equal(slots[holes], tombstones(holes, cache.page_size)):
        faults.append(f"request {req.rid}: a dropped position does not show its tombstone")
    if (slots[live] < cache.page_size).any():
        faults.append(f"request {req.rid}: a live position reads the dead page")
    filed = req.kv.cache_protected_len
    if not np.isin(slots[:filed][live[:filed]] // cache.page_size, tree_pages).all():
        faults.append(f"request {req.rid}: a filed position is not in the tree")
    return faults


def _free_pages(allocator: Any) -> torch.Tensor:
    """Page ids of the free list, with frees that wait for the end of an open group."""
    pending = torch.cat([torch.empty(0, dtype=torch.int64, device=allocator.device), *(allocator.free_group or ())])
    pages = [allocator.get_all_free_pages(), torch.unique(pending // allocator.page_size)]
    return torch.cat([*pages, *getattr(allocator, "free_page_ids_group", ())])
