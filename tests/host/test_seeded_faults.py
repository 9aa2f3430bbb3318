"""The idle check finds each fault that would hand one session's keys to another, the first time it looks."""

from __future__ import annotations

from array import array
from collections.abc import Callable
from types import SimpleNamespace
from unittest import mock

import numpy as np
import pytest
import torch
from sglang.srt.mem_cache.base_prefix_cache import InsertParams
from sglang.srt.mem_cache.radix_cache import RadixKey

from intentkv.apply.rows import tombstones
from intentkv.engine import idle, runtime
from tests.host.pools import publish_settings
from tests.host.stories import Stage
from tests.host.test_reclaim import make_world
from tests.host.world import World

publish_settings()


def free_behind_the_ledger(world: World, page: int) -> None:
    pages = world.allocator.free_pages
    world.allocator.free_pages = torch.cat((pages, torch.tensor([page], dtype=pages.dtype)))


def double_free(world: World) -> None:
    free_behind_the_ledger(world, int(world.allocator.get_all_free_pages()[0]))


def freed_survivor(world: World) -> None:
    free_behind_the_ledger(world, int(world.cache.tree_core.all_values_flatten()[-1]) // world.page_size)


def tombstone_in_a_row(world: World) -> None:
    (req,) = world.running
    world.pool.req_to_token[req.kv.req_pool_idx, 0] = 0


def tombstone_in_the_tree(world: World) -> None:
    """Text is published with a hole in it: one page shows its tombstones instead of KV."""
    slots, page = world.allocator.alloc(2 * world.page_size), world.page_size
    slots[page:] = torch.from_numpy(tombstones(np.arange(page, 2 * page), page))
    world.cache.insert(InsertParams(key=RadixKey(array("q", range(2 * page))), value=slots))


@pytest.mark.parametrize(("core", "page_size"), [("rust", 1), ("python", 16)])
@pytest.mark.parametrize(
    ("fault", "said"),
    [
        (double_free, "found 2"),
        (freed_survivor, "found 2"),
        (tombstone_in_a_row, "reads the dead page"),
        (tombstone_in_the_tree, "tree owns the dead page"),
    ],
)
def test_seeded_fault_is_found_at_the_next_idle_check(
    fault: Callable[[World], None], said: str, core: str, page_size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    def make(*, pages: int, chunk: int) -> World:
        return make_world(core, page_size, pages=pages, chunk=chunk)

    stage = Stage(make, pages=256)
    stage.drops["s"] = [3, 4]
    stage.say(stage.words("prompt", 12))
    stage.start(stage.words("other", 8), "other")
    active = SimpleNamespace(unaudited=1, cache=stage.cache)
    monkeypatch.setattr(idle, "SECONDS_BETWEEN", 0.0)
    with mock.patch.object(runtime, "_runtime", active):
        idle.audit_when_idle(None, None)
        active.unaudited = 1
        fault(stage.world)
        with pytest.raises(RuntimeError, match=said):
            idle.audit_when_idle(None, None)
