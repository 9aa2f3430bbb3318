"""Stories of pressure and loss: eviction, retraction, aborts, flushes, forgotten sessions."""

from __future__ import annotations

import numpy as np
from sglang.srt.mem_cache.common import release_kv_cache

from tests.host.checks import check_world, drain
from tests.host.stories import Make, Stage, text_of


def evicted_from_the_end(make: Make) -> None:
    """An idle session loses its namespace before its beginning, and finds all before the first live page gone."""
    stage = Stage(make, pages=64)
    stage.drops["s"] = [4, 5, 9]
    first = stage.say(stage.words("prompt", 20))
    stage.say(stage.words("stranger", 20), None)
    stage.world.evict((stage.available() + 13) * stage.page)  # its 13 live pages behind the first hole
    check_world(stage.world)
    second = stage.say(text_of(first) + stage.words("next", 1))
    assert stage.found(second) == 6, "pages 4 and 5 are dropped, so nothing is missing before page 6"
    assert second.intentkv.reused_prefix_tokens == 4 * stage.page
    assert stage.cache.stats()["namespaces_evicted"] == 1
    third = stage.say(text_of(second) + stage.words("next", 1))
    assert stage.found(third) == stage.filed(second)


def promise_is_kept(make: Make) -> None:
    stage = Stage(make, pages=128)
    for name in "abc":
        stage.drops[name] = [3, 4, 10]
        stage.say(stage.words("system", 6) + stage.words(name, 12), name)
    running = stage.start(stage.words("system", 6) + stage.words("a", 12) + stage.words("on", 3), "a")
    drain(stage.world)
    check_world(stage.world)
    stage.world.abort(running)
    drain(stage.world)
    assert stage.available() == 128


def event_in_a_free_group_evicts_nobody(make: Make) -> None:
    stage = Stage(make, pages=48)
    stranger = stage.say(stage.words("stranger", 12), None)
    req = stage.start(stage.words("prompt", 20), new=4)
    stage.drops["s"] = list(range(2, 18))
    stage.world.allocator.free_group_begin()
    stage.cache.checkpoint_decoding(req)
    stage.world.allocator.free_group_end()
    check_world(stage.world)
    assert req.intentkv.freed == 16 * stage.page
    assert stage.found(stage.say(text_of(stranger) + stage.words("next", 1), None)) == stage.filed(stranger)


def retracted_and_back(make: Make) -> None:
    stage = Stage(make)
    stage.drops["s"] = [4]
    first = stage.say(stage.words("prompt", 16))
    stage.drops["s"] = [4, 8]
    req = stage.start(text_of(first) + stage.words("next", 4))
    for _ in range(3):
        stage.world.decode([req])
    stage.world.retract(req)
    check_world(stage.world)
    assert stage.world.admit(req)
    check_world(stage.world)
    assert stage.found(req) >= 20, "what was filed before the retraction is found again"
    assert req.intentkv.holes.tolist() == stage.positions([4, 8]).tolist()
    while not req.finished():
        stage.world.decode([req])
    assert stage.found(stage.say(text_of(req) + stage.words("last", 1))) == stage.filed(req)


def disconnected(make: Make) -> None:
    """A client that goes away, between chunks or while decoding, leaves the last finished turn as it was."""
    stage = Stage(make, chunk=4)
    stage.drops["s"] = [4]
    first = stage.say(stage.words("prompt", 12))
    prompt = text_of(first) + stage.words("next", 12)
    chunked = stage.start(prompt)
    assert chunked in stage.world.prefilling
    stage.world.next_chunk(chunked)
    stage.world.abort(chunked)
    check_world(stage.world)
    decoding = stage.start(text_of(first) + stage.words("other", 2))
    stage.world.decode([decoding])
    stage.world.abort(decoding)
    check_world(stage.world)
    assert stage.found(stage.say(text_of(first) + stage.words("third", 2))) >= stage.filed(first)
    stage.drops["s"] = [4, 6]
    last = stage.say(text_of(first) + stage.words("fourth", 2))
    assert last.intentkv.freed == last.intentkv.dropped == stage.page, "what the lost requests left gives way"


def lost_before_the_first_checkpoint(make: Make) -> None:
    stage = Stage(make)
    stage.drops["s"] = [4]
    first = stage.say(stage.words("prompt", 12))
    one = stage.say(text_of(first) + stage.words("next", 4), new=1)
    assert one.finished() and stage.found(one) == stage.filed(first)
    assert stage.found(stage.say(text_of(one) + stage.words("on", 1))) == stage.filed(one)


def flushed(make: Make) -> None:
    stage = Stage(make)
    stage.drops["s"] = [4]
    first = stage.say(stage.words("prompt", 12))
    stage.world.flush()
    check_world(stage.world)
    assert stage.available() == 256 and stage.cache.stats()["sessions"] == 0
    stage.drops["s"] = []
    assert stage.found(stage.say(text_of(first))) == 0


def only_so_many_sessions(make: Make) -> None:
    stage = Stage(make)
    stage.cache.records.max_sessions = 2
    texts = {}
    for name in "abc":
        stage.drops[name] = [4]
        texts[name] = text_of(stage.say(stage.words(name, 12), name)) + stage.words("next", 1)
    assert stage.cache.stats()["sessions"] == 2
    assert stage.found(stage.say(texts["a"], "a")) == 4, "a forgotten session finds what anybody would"
    stage.cache.forget_session("c")
    assert stage.found(stage.say(texts["c"], "c")) == 4


def overshoot_of_the_overlapped_step(make: Make) -> None:
    """When the scheduler learns that a request has finished, one more token has been allocated for it already."""
    stage = Stage(make)
    stage.drops["s"] = [4]
    req = stage.start(stage.words("prompt", 12), new=64)
    stage.world.decode([req])
    stage.cache.checkpoint_decoding(req)
    stage.world.overshoot(req)
    req.sampling_params.max_new_tokens = len(req.output_ids)
    req.update_finish_state()
    stage.world.running.remove(req)
    release_kv_cache(req, stage.cache, checkpoint=True)
    check_world(stage.world)
    assert stage.found(stage.say(text_of(req) + stage.words("next", 1))) >= stage.filed(req)


def prefix_that_ends_in_a_hole(make: Make) -> None:
    """The paged allocator continues after the last slot of a prefix, also when that is a tombstone."""
    stage = Stage(make)
    stage.world.allocator.debug_mode = True
    stage.drops["s"] = [6, 7]
    first = stage.say(stage.words("prompt", 12))
    edited = stage.say(text_of(first)[: 8 * stage.page] + stage.words("edit", 3))
    assert stage.found(edited) == 8
    assert np.array_equal(edited.intentkv.holes, stage.positions([6, 7]))
    assert stage.found(stage.say(text_of(edited) + stage.words("on", 1))) == stage.filed(edited)


STORIES = [
    evicted_from_the_end,
    promise_is_kept,
    event_in_a_free_group_evicts_nobody,
    retracted_and_back,
    disconnected,
    lost_before_the_first_checkpoint,
    flushed,
    only_so_many_sessions,
    overshoot_of_the_overlapped_step,
    prefix_that_ends_in_a_hole,
]
