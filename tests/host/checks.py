"""The invariants of the cache, checked on a `World` after every step."""

from __future__ import annotations

from array import array

import numpy as np
from sglang.srt.managers.schedule_batch import Req
from sglang.srt.managers.scheduler_components.pool_stats_observer import kv_private_tokens
from sglang.srt.mem_cache.base_prefix_cache import EvictParams
from sglang.srt.mem_cache.radix_cache import RadixKey

from intentkv.apply.namespace import Segment
from intentkv.apply.rows import NO_POSITIONS
from intentkv.engine.session_records import Record
from tests.host.world import World


def check_world(world: World) -> None:
    """Everything that must hold between two steps, whatever happened before."""
    assert world.cache.audit() == []
    check_ledger(world)
    for req in world.prefilling + world.running:
        check_request(world, req)
    for session in world.cache.records._sessions:
        for record in world.cache.records.of(session):
            check_record(world, record)


def check_ledger(world: World) -> None:
    """SGLang's own sum, with SGLang's own formula for what a running request holds outside the tree."""
    cache = world.cache
    private = sum(kv_private_tokens(req.kv, world.page_size) for req in world.prefilling + world.running)
    parts = {
        "available": world.allocator.available_size(),
        "evictable": cache.evictable_size(),
        "protected": cache.protected_size(),
        "private": private,
    }
    assert sum(parts.values()) == world.size, parts


def check_request(world: World, req: Req) -> None:
    """A running row reads its own text and no hole but its own; the live view lists exactly its live slots."""
    computed = req.kv.kv_allocated_len
    world.check_row(req, computed)
    holes = world.holes_of(req)
    assert req.kv.cache_protected_len % world.page_size == 0
    if len(holes):
        assert holes[-1] < req.kv.cache_protected_len, "a hole in the part of the row that is not filed"
        pages, counts = np.unique(holes // world.page_size, return_counts=True)
        assert not world.cache.whole_pages or (counts == world.page_size).all(), "a page is dropped in part"
        assert (computed - 1) // world.page_size not in pages, "part of the page of the last token is dropped"
    live = np.delete(world.row(req, computed), holes)
    assert np.array_equal(world.cache.views.slots(req.kv.req_pool_idx, computed).numpy(), live)


def check_record(world: World, record: Record) -> None:
    """What is left of a parked session holds its text, computed behind no hole that it does not have."""
    for segment in record.path:
        slots = segment_slots(world, segment, record)
        positions = segment.positions()[: len(slots)]
        slots, positions = slots[positions >= 0], positions[positions >= 0]
        holes = NO_POSITIONS if segment.name is None else record.holes
        world.contents.check(slots, record.tokens.tolist(), positions, holes)


def check_text(world: World, tokens: list[int], extra_key: str | None = None, salt: str | None = None) -> int:
    """The text's own key leads to nothing but KV computed without holes; returns how much of it is there."""
    slots = path_slots(world, RadixKey(array("q", tokens), extra_key=extra_key, cache_salt=salt))
    world.contents.check(slots, tokens, np.arange(len(slots)), NO_POSITIONS)
    return len(slots)


def segment_slots(world: World, segment: Segment, record: Record) -> np.ndarray:
    if segment.name is None:
        tokens = array("q", record.tokens[: segment.end].tolist())
        return path_slots(world, RadixKey(tokens, extra_key=record.scope[0], cache_salt=record.scope[1]))
    return path_slots(world, RadixKey(segment.key(), extra_key=segment.name))


def path_slots(world: World, key: RadixKey) -> np.ndarray:
    """Slots that a key finds, without touching the tree."""
    core = world.cache.tree_core
    length, node, _ = core.match_full_device_prefix(key)
    return core.collect_full_device_indices(node, world.cache.root_node_handle())[:length].numpy()


def drain(world: World) -> None:
    """What the pool promises, an eviction delivers."""
    promised = world.allocator.available_size() + world.cache.evictable_size()
    world.cache.evict_for_alloc(EvictParams(num_tokens=world.cache.evictable_size()))
    assert world.allocator.available_size() == promised
    check_ledger(world)
