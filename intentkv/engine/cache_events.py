"""What changes in the tree when a session has holes: filing new tokens, and applying a drop.

Both run inside a checkpoint, possibly while a free group is open. Nothing here evicts: freed slots of an open group do
not show in the pool's count, and an eviction would go on until the tree is empty.
"""

from __future__ import annotations

from array import array
from typing import TYPE_CHECKING, Final

import numpy as np
import torch
from sglang.srt.mem_cache.base_prefix_cache import InsertParams, MatchPrefixParams
from sglang.srt.mem_cache.radix_cache import RadixKey

from intentkv.apply.compaction import Packing, pack_pages
from intentkv.apply.namespace import UNREAD, Segment, entry_ids
from intentkv.apply.rows import common_prefix, merge, page_floor, tombstones
from intentkv.engine.cache_paths import PathNode, match_entries
from intentkv.engine.cache_withdraw import withdraw

if TYPE_CHECKING:
    from intentkv.engine.cache import IntentKVRadixCache
    from intentkv.engine.cache_rows import Row
    from intentkv.engine.session_records import Record

RUNS_SHORT: Final = 16  # a pool of which less than one part in so many can be allocated


def file_tail(cache: IntentKVRadixCache, row: Row, up_to: int) -> None:
    """File what a row with holes has computed up to `up_to` under its namespace, in whole pages.

    The tokens were computed behind holes, so they are never published under their text. Where a parallel request of the
    session filed the same tokens first, the duplicates are freed and the row reads the tree's copy, as in a stock
    publish.
    """
    end = page_floor(up_to, cache.page_size)
    if end <= row.end:
        return
    tail, last = np.arange(row.end, end), row.path[-1]
    ids = entry_ids(tail, np.array(row.req.full_untruncated_fill_ids[:end], dtype=np.int64))
    if last.name is not None and last.admits(row.holes):
        segment, path, nodes = last.grown(end, ids), row.path[:-1], row.nodes[:-1]
        before = _slots(cache, row.nodes[-1], len(last.ids))
    else:
        segment, path, nodes = Segment(cache.names.fresh(), end, ids, row.holes), row.path, row.nodes
        before = torch.empty(0, dtype=torch.int64, device=cache.tree_core.device)
    table, where = cache.req_to_token_pool, torch.from_numpy(tail).to(cache.req_to_token_pool.device)
    new = table.req_to_token[row.index, where].to(torch.int64)
    node = _insert(cache, row, segment, torch.cat((before, new)), len(before))
    owned = _slots(cache, node, len(segment.ids))
    table.write((row.index, where), owned[len(before) :].to(torch.int32))
    lock, row.req.lock = row.req.lock, None
    _settle(cache, row, (*path, segment), (*nodes, node))
    cache.unlock(lock)


def apply_drop(cache: IntentKVRadixCache, row: Row, drop: np.ndarray) -> int:
    """Drop positions of a row that is filed up to its last whole page; returns how many slots went back to the pool.

    In four steps: take out of the tree what nobody else holds, from the end of the row down to the first hole; pack the
    survivors among it into whole pages, while nobody but this row can see them; free all other pages; file the packed
    ones under a fresh name. What others hold stays in the tree, and the row merely stops reading it; the next event
    tries again.

    Args:
        cache: the cache; its tree, its allocator, its row of the request and KV in private slots are changed.
        row: the request's row; gets a new path.
        drop: `[n]` int64, live positions below the row's end.
    """
    row.holes = merge(row.holes, drop)
    end, tokens = row.end, row.tokens()
    cut = _first_to_go(cache, row, tokens)
    _give_way(cache, row, tokens, cut)
    cache.unlock(row.req.lock)
    row.req.lock = None
    path, nodes, positions, slots = _withdraw_row(cache, row, tokens, cut)
    freed = 0
    if len(slots) or not path or path[-1].end < end:
        survives = ~np.isin(positions, row.holes) & (positions != UNREAD) | (cache.layout == "mask")
        packing = pack_pages(survives, cache.page_size)
        _move(cache, row, positions, slots, packing)
        _free(cache, row, _take(slots, packing.freed))
        held = np.append(positions, UNREAD)[packing.holds]
        segment = Segment(cache.names.fresh(), end, entry_ids(held, tokens, row.holes), row.holes)
        node = _insert(cache, row, segment, _take(slots, packing.places), 0)
        path, nodes, freed = (*path, segment), (*nodes, node), len(packing.freed)
    pool = cache.req_to_token_pool
    marks = torch.from_numpy(tombstones(drop, cache.page_size)).to(pool.device, torch.int32)
    pool.write((row.index, torch.from_numpy(drop).to(pool.device)), marks)
    _settle(cache, row, path, nodes)
    return freed


def _move(cache: IntentKVRadixCache, row: Row, positions: np.ndarray, slots: torch.Tensor, packing: Packing) -> None:
    """Copy survivors to where they are packed, and let the row read them there; `positions`, `slots`: `[n]`, entries."""
    if not len(packing.sources):
        return
    sources, destinations = _take(slots, packing.sources), _take(slots, packing.destinations)
    both = torch.cat((sources, destinations))
    cache.ledger.check_held(both)
    _check_unmapped(cache, row, both)
    cache.move(sources, destinations)
    pool = cache.req_to_token_pool
    moved = torch.from_numpy(positions[packing.sources]).to(pool.device)
    pool.write((row.index, moved), destinations.to(torch.int32))


def _first_to_go(cache: IntentKVRadixCache, row: Row, tokens: np.ndarray) -> int:
    """Where the row's own-key segment is cut: at its first hole, or behind what others share if that is longer.

    Sparing what others may come back for is a courtesy that ends when the pool runs short: as an idle text it would be
    evicted.
    """
    first = page_floor(int(row.holes[0]), cache.page_size)
    if first >= row.head:
        return row.head
    allocator = cache.token_to_kv_pool_allocator
    if (allocator.available_size() + cache.evictable_size()) * RUNS_SHORT < allocator.size:
        return first
    shared = cache.guard.shared(("session", row.session), row.scope, tokens[: row.head], beyond=first)
    return page_floor(shared, cache.page_size)


def _withdraw_row(
    cache: IntentKVRadixCache, row: Row, tokens: np.ndarray, cut: int
) -> tuple[tuple[Segment, ...], tuple[int, ...], np.ndarray, torch.Tensor]:
    """Withdraw a row's nodes from its end: whole namespaces, and its own-key segment down to `cut`.

    Returns:
        Segments and nodes that stay; positions, `[n]` int64, and slots, `[n]` int64, of the entries that came out: whole
        pages, with UNREAD where the row reads nothing.
    """
    core = cache.tree_core
    path, nodes = list(row.path), list(row.nodes)
    positions: list[np.ndarray] = []
    slots: list[torch.Tensor] = []
    while path:
        segment, entries = path[-1], path[-1].positions()
        floor = cut if segment.name is None else 0
        if 0 < floor < len(entries):
            # A match that ends inside a node splits it there.
            core.match_prefix(MatchPrefixParams(key=_text_key(row, tokens[:floor])))
        out = withdraw(core, nodes[-1], floor)
        cache.ledger.leave_tree(out.slots)
        positions.append(entries[out.kept :])
        slots.append(out.slots)
        if out.node is not None:
            if out.kept < len(entries):
                kept = Segment.of_text(out.kept) if segment.name is None else segment.held(out.kept, segment.end)
                path[-1], nodes[-1] = kept, out.node
            break
        path.pop()
        nodes.pop()
    return tuple(path), tuple(nodes), np.concatenate(positions[::-1]), torch.cat(slots[::-1])


def _give_way(cache: IntentKVRadixCache, row: Row, tokens: np.ndarray, cut: int) -> None:
    """Free the session's own idle texts that hang on what is about to be withdrawn.

    An edited history, or a chat template that rewrites the last answer, leaves the old continuation as a branch; were
    it kept, the nodes below could never come out. What others share, and what a parallel request still runs on, stays.
    """
    for record in cache.records.of(row.session):
        common = page_floor(common_prefix(record.tokens, tokens), cache.page_size)
        if record.scope != row.scope or common <= cut or common >= len(record.tokens):
            continue
        if _let_go(cache, row, record, common):
            cache.records.remove(row.session, record)


def let_go_forgotten(cache: IntentKVRadixCache, row: Row, record: Record) -> None:
    """Free what a text that its session no longer remembers has for itself: no event could find and free it later.

    With a template that rewrites every answer that is a text a turn; were it left, what lies below would not come out of the tree
    until it is evicted.
    """
    others = [other.tokens for other in cache.records.of(row.session) if other.scope == record.scope]
    if record.scope == row.scope and others:
        _let_go(cache, row, record, page_floor(max(common_prefix(record.tokens, o) for o in others), cache.page_size))


def _let_go(cache: IntentKVRadixCache, row: Row, record: Record, common: int) -> bool:
    """Free what `record` has from position `common` on, unless others share it or run on it; whether all of it went."""
    gone = True
    for segment in reversed(record.path):
        floor = len(segment.cut(common, cache.page_size).ids)
        if segment.name is None:
            user = ("session", row.session)
            shared = cache.guard.shared(user, row.scope, record.tokens[: segment.end], beyond=min(common, segment.end))
            floor = page_floor(shared, cache.page_size)
        out = withdraw(cache.tree_core, _match(cache, row, segment, record), floor)
        gone &= out.kept <= floor
        cache.ledger.leave_tree(out.slots)
        _free(cache, row, out.slots)
    return gone


def _match(cache: IntentKVRadixCache, row: Row, segment: Segment, record: Record) -> int:
    """The node at the end of what is left of a record's segment."""
    if segment.name is not None:
        return match_entries(cache.tree_core, segment)[1]
    key = _text_key(row, record.tokens[: segment.end])
    return cache.tree_core.match_prefix(MatchPrefixParams(key=key)).last_device_node


def _text_key(row: Row, tokens: np.ndarray) -> RadixKey:
    ids = array("q", tokens.astype(np.int64).tobytes())
    return RadixKey(ids, extra_key=row.req.extra_key, cache_salt=row.req.cache_salt)


def _insert(cache: IntentKVRadixCache, row: Row, segment: Segment, slots: torch.Tensor, filed: int) -> int:
    """Insert the entries of a private segment, of which the tree has `filed`; returns the node they end on."""
    if not len(segment.ids):
        return cache.root_node_handle()
    params = InsertParams(
        key=RadixKey(segment.key(), extra_key=segment.name),
        value=slots,
        prev_prefix_len=filed,
        inserted_len=filed,
        priority=row.req.priority or 0,
    )
    return cache.insert(params).last_device_node


def _slots(cache: IntentKVRadixCache, node: int, entries: int) -> torch.Tensor:
    """Slots of the first `entries` of the path to `node`, `[entries]` int64."""
    return cache.tree_core.collect_full_device_indices(node, cache.root_node_handle())[:entries]


def _settle(cache: IntentKVRadixCache, row: Row, path: tuple[Segment, ...], nodes: tuple[int, ...]) -> None:
    """Put a row on its new path and lock it."""
    req = row.req
    row.path, row.nodes = path, nodes
    req.last_node = PathNode.of(cache.root_node_handle(), path, nodes, row.holes)
    req.lock = cache.lock(req.last_node)
    req.kv.cache_protected_len = row.end
    if path[0].name is None:  # touched last, so that the beginning is not evicted before what hangs on it
        cache.touch_prefix(_text_key(row, row.tokens()[: path[0].end]))


def _take(slots: torch.Tensor, chosen: np.ndarray) -> torch.Tensor:
    """The entries `chosen` `[n]` int64 of `slots`. A mask on the device would make the host wait to learn its length."""
    return slots[torch.from_numpy(chosen).to(slots.device)]


def _free(cache: IntentKVRadixCache, row: Row, slots: torch.Tensor) -> None:
    """Free whole pages of `slots`, `[n]` int64, which no tree path and no other row may reach."""
    if len(slots):
        _check_unmapped(cache, row, slots)
        cache.token_to_kv_pool_allocator.free_segment(slots, start_pos=0)


def _check_unmapped(cache: IntentKVRadixCache, row: Row, slots: torch.Tensor) -> None:
    """Make sure that no other row maps `slots`, `[n]` int64, which are about to be freed, or read and written."""
    table = cache.req_to_token_pool.req_to_token
    used = {index: req.kv.kv_allocated_len for index, req in cache.running.items() if index != row.index}
    if used:
        lengths = torch.tensor(list(used.values()), device=table.device)
        rows = table[list(used), : max(used.values())]
        cache.ledger.check_unmapped(slots, rows, lengths, by=f"session {row.session}")
