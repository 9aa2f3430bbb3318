"""Stories of texts that several requests share: forks, parallel calls, edits, other tenants."""

from __future__ import annotations

import numpy as np

from intentkv.engine.session_records import BRANCHES
from tests.host.checks import check_world
from tests.host.stories import Make, Stage, text_of


def fork_before_the_parent_prunes(make: Make) -> None:
    stage = Stage(make)
    parent = stage.say(stage.words("prompt", 20), "parent")
    fork = stage.say(text_of(parent) + stage.words("other way", 4), "fork")
    assert stage.found(fork) == stage.filed(parent)
    stage.drops["fork"] = [5, 6, 22]
    fork = stage.say(text_of(fork) + stage.words("on", 4), "fork")
    assert fork.intentkv.dropped == 3 * stage.page
    assert fork.intentkv.freed == stage.page, "what the idle parent may come back for is masked, not freed"
    parent = stage.say(text_of(parent) + stage.words("next", 4), "parent")
    assert stage.found(parent) >= 20
    assert stage.found(stage.say(text_of(fork) + stage.words("more", 1), "fork")) == stage.filed(fork)


def fork_while_the_parent_runs(make: Make) -> None:
    stage = Stage(make)
    parent = stage.start(stage.words("prompt", 20), "parent")
    fork = stage.start(stage.words("prompt", 20) + stage.words("fork", 4), "fork")
    assert stage.found(fork) == 20
    stage.drops["parent"] = [4, 5]
    rows = stage.world.row(fork, 24 * stage.page).copy()
    stage.cache.checkpoint_decoding(parent)
    check_world(stage.world)
    assert parent.intentkv.dropped == 2 * stage.page and parent.intentkv.freed == 0
    assert np.array_equal(rows, stage.world.row(fork, 24 * stage.page)), "another request's row must not change"
    stage.world.abort(fork)
    check_world(stage.world)


def others_let_go(make: Make) -> None:
    """What a running request held is freed by the next event after it is gone."""
    stage = Stage(make)
    parent = stage.start(stage.words("prompt", 20), "parent")
    fork = stage.start(stage.words("prompt", 20) + stage.words("fork", 4), "fork")
    stage.drops["parent"] = [4, 5]
    stage.cache.checkpoint_decoding(parent)
    stage.world.abort(fork)
    stage.cache.forget_session("fork")
    stage.world.evict(stage.world.size)
    stage.drops["parent"] = [4, 5, 9]
    stage.cache.checkpoint_decoding(parent)
    check_world(stage.world)
    assert parent.intentkv.dropped == parent.intentkv.freed == 3 * stage.page


def fork_after_the_parent_pruned(make: Make) -> None:
    stage = Stage(make)
    stage.drops["parent"] = [5, 6]
    parent = stage.say(stage.words("prompt", 20), "parent")
    fork = stage.say(text_of(parent) + stage.words("other way", 4), "fork")
    assert stage.found(fork) == 5, "past the first hole nothing may be shared"
    parent = stage.say(text_of(parent) + stage.words("next", 4), "parent")
    assert stage.found(parent) >= 20, "the fork has taken nothing away"


def parallel_calls_of_one_session(make: Make) -> None:
    stage = Stage(make)
    stage.drops["s"] = [5, 6]
    first = stage.say(stage.words("prompt", 20))
    one = stage.start(text_of(first) + stage.words("one", 4))
    two = stage.start(text_of(first) + stage.words("two", 4))
    assert stage.found(one) == stage.filed(first) and stage.found(two) >= stage.filed(first)
    stage.drops["s"] = [5, 6, 12]
    before = stage.world.row(two, 20 * stage.page).copy()
    stage.cache.checkpoint_decoding(one)
    check_world(stage.world)
    assert np.array_equal(before, stage.world.row(two, 20 * stage.page))
    for req in (one, two, one, two):
        stage.world.decode([req])
        check_world(stage.world)
    same = stage.start(text_of(first) + stage.words("two", 4) + stage.words("same", 2))
    assert stage.found(same) >= stage.filed(first)
    for req in (one, two, same):
        while not req.finished():
            stage.world.decode([req])
        check_world(stage.world)
        assert stage.found(stage.say(text_of(req) + stage.words("on", 1))) >= stage.filed(first)


def twins_with_different_holes(make: Make) -> None:
    """Two requests say the same; one drops a page both run on. The other must not read what was said without it."""
    stage = Stage(make)
    stage.drops["s"] = [5]
    first = stage.say(stage.words("prompt", 20))
    one, twin = (stage.start(text_of(first) + stage.words("same", 2), new=3 * stage.page) for _ in range(2))
    stage.drops["s"] = [5, 12]
    stage.cache.checkpoint_decoding(one)
    check_world(stage.world)
    assert one.intentkv.dropped == stage.page and one.intentkv.freed == 0
    stage.drops["s"] = []
    for req in (one, twin):
        while not req.finished():
            stage.world.decode([req])
        check_world(stage.world)
    assert twin.intentkv.holes.tolist() == stage.positions([5]).tolist()
    assert stage.found(stage.say(text_of(twin) + stage.words("on", 1))) == stage.filed(twin)


def edited_history(make: Make) -> None:
    stage = Stage(make)
    stage.drops["s"] = [3, 8]
    first = stage.say(stage.words("prompt", 20))
    edited = text_of(first)[: 12 * stage.page] + stage.words("edit", 6)
    second = stage.say(edited)
    assert stage.found(second) == 12
    assert second.intentkv.holes.tolist() == stage.positions([3, 8]).tolist()
    assert stage.found(stage.say(text_of(second) + stage.words("on", 1))) == stage.filed(second)


def retried_turn(make: Make) -> None:
    stage = Stage(make)
    stage.drops["s"] = [3, 8]
    prompt = stage.words("prompt", 20)
    stage.say(prompt, new=2 * stage.page)
    again = stage.say(prompt)
    assert stage.found(again) == 19, "all but the last page, which has to be computed to answer"
    stage.drops["s"] = [3, 8, 12]
    third = stage.say(prompt)
    assert third.intentkv.freed == third.intentkv.dropped == stage.page, "the earlier answers gave way"
    assert stage.found(stage.say(text_of(third) + stage.words("on", 1))) == stage.filed(third)


def rewritten_answer_gives_way(make: Make) -> None:
    """A chat template that rewrites the last answer leaves a branch each turn; dropped pages come back all the same."""
    stage = Stage(make)
    text = stage.words("prompt", 12)
    for turn in range(5):
        stage.drops["s"] = [2 + turn]
        req = stage.say(text, new=3 * stage.page)
        assert req.intentkv.freed == req.intentkv.dropped == stage.page
        text += stage.words(f"rewritten {turn}", 2) + stage.words(f"question {turn}", 3)


def rewritten_answers_between_events(make: Make) -> None:
    """Nine branches before the next event, more than a session remembers: what is forgotten takes its pages along, unless
    a parallel call runs on it."""
    for parallel in (False, True):
        stage = Stage(make)
        stage.drops["s"] = [2]
        first = stage.say(stage.words("prompt", 12), new=3 * stage.page)
        other = stage.start(text_of(first) + stage.words("parallel", 2), new=3 * stage.page) if parallel else None
        text = text_of(first)[: 12 * stage.page]
        for turn in range(9):
            text += stage.words(f"rewritten {turn}", 2) + stage.words(f"question {turn}", 3)
            stage.drops["s"] = [2] if turn < 8 else [2, 4, 15]
            req = stage.say(text, new=3 * stage.page)
            assert stage.found(req) == 12 + 5 * turn
            assert len(stage.cache.records.of("s")) <= BRANCHES
        if other is None:
            assert req.intentkv.freed == req.intentkv.dropped == 2 * stage.page
            assert stage.cache.evictable_size() // stage.page == stage.filed(req) - 3
        else:
            while not other.finished():
                stage.world.decode([other])
                check_world(stage.world)
            assert stage.found(stage.say(text_of(other) + stage.words("on", 1))) >= 12


def tenants_do_not_meet(make: Make) -> None:
    stage = Stage(make)
    stage.drops["s"] = [4]
    first = stage.say(stage.words("prompt", 12), extra_key="a")
    text = text_of(first) + stage.words("next", 2)
    for scope in ({"extra_key": "b"}, {}, {"extra_key": "a", "salt": "x"}):
        assert stage.found(stage.say(text, **scope)) == 0
    assert stage.found(stage.say(text, session="other", extra_key="a")) == 4
    assert stage.found(stage.say(text, extra_key="a")) >= stage.filed(first)
    stage.drops["t"] = [0]
    first = stage.say(stage.words("all private", 12), session="t", extra_key="a")
    assert stage.found(stage.say(text_of(first) + stage.words("next", 2), session="t", extra_key="b")) == 0


def common_document_across_sessions(make: Make) -> None:
    stage = Stage(make)
    stage.drops = {name: [30 + i] for i, name in enumerate("abcd")}
    document = stage.words("document", 20)
    for name in "abcd":
        req = stage.say(document + stage.words(name, 16), name)
        assert req.intentkv.freed == stage.page
        assert stage.found(req) == (0 if name == "a" else 20)
    assert stage.published(document) == 20


STORIES = [
    fork_before_the_parent_prunes,
    fork_while_the_parent_runs,
    others_let_go,
    fork_after_the_parent_pruned,
    parallel_calls_of_one_session,
    twins_with_different_holes,
    edited_history,
    retried_turn,
    rewritten_answer_gives_way,
    rewritten_answers_between_events,
    tenants_do_not_meet,
    common_document_across_sessions,
]
