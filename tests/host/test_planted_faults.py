"""The suite is worth something only if it notices: each deliberate fault in our code makes some reclaim story fail."""

from __future__ import annotations

from array import array
from collections.abc import Callable
from dataclasses import replace
from functools import partial

import numpy as np
import pytest
import torch
from sglang.srt.mem_cache.base_prefix_cache import TreeLock
from sglang.srt.mem_cache.common import evict_from_tree_cache
from sglang.srt.mem_cache.unified_radix_cache import UnifiedRadixCache

from intentkv.apply.guard import SharedText
from intentkv.apply.live_view import LiveViews
from intentkv.apply.namespace import Segment
from intentkv.engine import cache as cache_module
from intentkv.engine import cache_events, cache_paths
from intentkv.engine.cache import IntentKVRadixCache
from intentkv.engine.cache_withdraw import Withdrawal, _evict_leaf
from intentkv.engine.session_records import SessionRecords
from tests.host.contents import Contents
from tests.host.pools import publish_settings
from tests.host.test_reclaim import STORIES, make_world

publish_settings()
Patch = pytest.MonkeyPatch


def free_a_survivor(patch: Patch) -> None:
    merge = cache_events.merge
    patch.setattr(cache_events, "merge", lambda holes, drop: merge(merge(holes, drop), drop[-1:] + 1))


def publish_past_a_hole(patch: Patch) -> None:
    patch.setattr(
        cache_module, "file_tail", lambda cache, row, up_to: UnifiedRadixCache.checkpoint(cache, row.req, up_to=up_to)
    )


def namespace_key_without_position(patch: Patch) -> None:
    patch.setattr(Segment, "key", lambda self: array("q", (self.ids & 0xFFFFFFFF).tobytes()))


def guard_off(patch: Patch) -> None:
    patch.setattr(SharedText, "shared", lambda self, user, scope, tokens, beyond: beyond)


def double_free(patch: Patch) -> None:
    free = cache_events._free
    patch.setattr(cache_events, "_free", lambda cache, row, slots: (free(cache, row, slots), free(cache, row, slots)))


def dead_slot_freed(patch: Patch) -> None:
    free = cache_events._free
    dead = torch.zeros(1, dtype=torch.int64)
    patch.setattr(cache_events, "_free", lambda cache, row, slots: free(cache, row, torch.cat((slots, dead))))


def extend_a_shared_namespace(patch: Patch) -> None:
    patch.setattr(Segment, "admits", lambda self, holes: self.name is not None)


def evict_inside_a_free_group(patch: Patch) -> None:
    apply_drop = cache_events.apply_drop

    def evicting(cache, row, drop):
        freed = apply_drop(cache, row, drop)
        evict_from_tree_cache(cache, cache.token_to_kv_pool_allocator.available_size() + 1)
        return freed

    patch.setattr(cache_module, "apply_drop", evicting)


def last_page_pruned(patch: Patch) -> None:
    patch.setattr(
        cache_module, "droppable", lambda drop, holes, length, *rest: np.setdiff1d(drop[drop < length], holes)
    )


def part_of_a_page_pruned(patch: Patch) -> None:
    """Although attention reads whole pages."""
    droppable = cache_module.droppable
    patch.setattr(cache_module, "droppable", lambda *arguments: droppable(*arguments[:4]))


def move_what_the_tree_owns(patch: Patch) -> None:
    move = cache_events._move

    def greedy(cache, row, positions, slots, packing):
        slots = slots.clone()
        slots[packing.destinations[:1]] = cache.req_to_token_pool.req_to_token[row.index, :1].long()
        move(cache, row, positions, slots, packing)

    patch.setattr(cache_events, "_move", greedy)


def free_before_copy(patch: Patch) -> None:
    move, free, waiting = cache_events._move, cache_events._free, []

    def later(cache, row, slots):
        free(cache, row, slots)
        while waiting:
            move(*waiting.pop())

    patch.setattr(cache_events, "_move", lambda *arguments: waiting.append(arguments))
    patch.setattr(cache_events, "_free", later)


def row_not_told_of_a_move(patch: Patch) -> None:
    move = cache_events._move

    def untold(cache, row, positions, slots, packing):
        before = cache.req_to_token_pool.req_to_token[row.index].clone()
        move(cache, row, positions, slots, packing)
        cache.req_to_token_pool.req_to_token[row.index] = before

    patch.setattr(cache_events, "_move", untold)


def contents_left_behind(patch: Patch) -> None:
    patch.setattr(Contents, "move", lambda self, sources, destinations: None)


def packed_in_another_order_than_filed(patch: Patch) -> None:
    pack = cache_events.pack_pages
    patch.setattr(
        cache_events, "pack_pages", lambda *a: replace(pack(*a), holds=np.sort(pack(*a).holds, kind="stable"))
    )


def padding_filed_as_a_token(patch: Patch) -> None:
    pack = cache_events.pack_pages
    patch.setattr(cache_events, "pack_pages", lambda *a: replace(pack(*a), holds=np.maximum(pack(*a).holds, 0)))


def what_went_another_way_is_read(patch: Patch) -> None:
    cut = Segment.cut
    patch.setattr(Segment, "cut", lambda self, end, page_size: replace(cut(self, end, page_size), end=self.end))
    held = Segment.held
    patch.setattr(Segment, "held", lambda self, entries, end: replace(held(self, entries, end), end=self.end))


def promise_more_than_eviction_delivers(patch: Patch) -> None:
    size = UnifiedRadixCache.evictable_size
    patch.setattr(
        IntentKVRadixCache,
        "evictable_size",
        lambda self: size(self) + 2 * len(self.records) * self.page_size,
        raising=False,
    )


def lock_the_namespace_only(patch: Patch) -> None:
    lock = IntentKVRadixCache.lock

    def last_only(self, node, *args) -> TreeLock:
        whole = lock(self, node, *args)
        for part in getattr(whole, "parts", ())[:-1]:
            UnifiedRadixCache.unlock(self, part)
        if hasattr(whole, "parts"):
            whole.parts = whole.parts[-1:]
        return whole

    patch.setattr(IntentKVRadixCache, "lock", last_only)


def withdraw_what_others_hold(patch: Patch) -> None:
    def greedy(core, node, floor) -> Withdrawal:
        path, taken = core.collect_path_info([node])[0], []
        while path and path[-1].path_start >= floor:
            taken.append(_evict_leaf(core, path[-1].node_id))
            path = path[:-1]
        slots = torch.cat(taken[::-1]) if taken else torch.empty(0, dtype=torch.int64)
        return Withdrawal(path[-1].path_end if path else 0, path[-1].node_id if path else None, slots)

    patch.setattr(cache_events, "withdraw", greedy)


def own_branches_stay_in_the_way(patch: Patch) -> None:
    patch.setattr(cache_events, "_give_way", lambda cache, row, tokens, cut: None)


def forgotten_texts_stay(patch: Patch) -> None:
    patch.setattr(cache_module, "let_go_forgotten", lambda cache, row, record: None)


def beginning_is_evicted_first(patch: Patch) -> None:
    settle = cache_events._settle

    def namespace_touched_last(cache, row, path, nodes) -> None:
        settle(cache, row, path, nodes)
        for segment in path:
            if segment.name is not None:
                cache_paths.match_entries(cache.tree_core, segment)

    patch.setattr(cache_events, "_settle", namespace_touched_last)


def holes_forgotten_at_the_next_turn(patch: Patch) -> None:
    assemble = cache_paths.assemble

    def without_holes(*arguments):
        node = assemble(*arguments)
        node.holes = node.holes[:0]
        return node

    patch.setattr(cache_module, "assemble", without_holes)


def view_not_told(patch: Patch) -> None:
    patch.setattr(LiveViews, "set_holes", lambda self, row, holes, upto: None)


def view_outlives_the_row(patch: Patch) -> None:
    patch.setattr(LiveViews, "clear", lambda self, row: None)


def records_survive_a_flush(patch: Patch) -> None:
    patch.setattr(SessionRecords, "clear", lambda self: None)


def scope_ignored(patch: Patch) -> None:
    class Anywhere(tuple):
        def __eq__(self, other: object) -> bool:
            return True

        __hash__ = tuple.__hash__

    record = cache_module.Record
    patch.setattr(cache_module, "Record", lambda scope, *rest: record(Anywhere(scope), *rest))


PARTS = [
    part_of_a_page_pruned,
    move_what_the_tree_owns,
    free_before_copy,
    row_not_told_of_a_move,
    contents_left_behind,
    packed_in_another_order_than_filed,
    padding_filed_as_a_token,
]

FAULTS = [
    free_a_survivor,
    publish_past_a_hole,
    namespace_key_without_position,
    guard_off,
    double_free,
    dead_slot_freed,
    extend_a_shared_namespace,
    evict_inside_a_free_group,
    last_page_pruned,
    *PARTS,
    what_went_another_way_is_read,
    promise_more_than_eviction_delivers,
    lock_the_namespace_only,
    withdraw_what_others_hold,
    own_branches_stay_in_the_way,
    forgotten_texts_stay,
    beginning_is_evicted_first,
    holes_forgotten_at_the_next_turn,
    view_not_told,
    view_outlives_the_row,
    records_survive_a_flush,
    scope_ignored,
]


def first_to_notice(core: str, page_size: int) -> str | None:
    """The first story that fails, with what it says."""
    for story in STORIES:
        try:
            story(partial(make_world, core, page_size))
        except BaseException as error:
            # A story fails with an ordinary error, or with the panic of a poisoned Rust core, which is no Exception.
            if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
                raise
            return f"{story.__name__}: {error}"
    return None


@pytest.mark.parametrize(("core", "page_size"), [("rust", 1), ("python", 16)])
@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.__name__)
def test_planted_fault_in_reclaim(
    fault: Callable[[Patch], None], core: str, page_size: int, monkeypatch: Patch
) -> None:
    fault(monkeypatch)
    noticed = first_to_notice(core, page_size)
    if fault in PARTS and page_size == 1:
        assert noticed is None, "a page of one token has no parts"
    else:
        assert noticed, f"no story notices the fault {fault.__name__}"
