"""Stories of drops that cut into pages: survivors are packed while they are private, so that whole pages come back."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
from sglang.srt.managers.schedule_batch import Req

from tests.host.checks import check_world, drain
from tests.host.stories import Make, Stage, text_of


class Ragged(Stage):
    """A stage where sessions drop single positions; `moved` counts the copies of KV."""

    def __init__(self, make: Make, **options: object) -> None:
        super().__init__(make, **options)
        self.wanted: dict[str, np.ndarray] = {}
        self.world.decide = lambda req, length: self.wanted.get(req.intentkv.session, np.empty(0, np.int64))
        self.moved = 0
        move = self.cache.move

        def counted(sources, destinations):
            self.moved += len(sources)
            move(sources, destinations)

        self.cache.move = counted

    def drop(self, pages: Iterable[int], share: int = 2, session: str = "s") -> int:
        """From now on `session` also drops every `share`-th position of some pages; returns how many are new."""
        before = self.wanted.get(session, np.empty(0, np.int64))
        self.wanted[session] = np.union1d(before, self.positions(pages)[::share])
        return len(self.wanted[session]) - len(before)

    def on(self, req: Req, name: str) -> list[int]:
        """The next prompt of a conversation."""
        return text_of(req) + self.words(name, 3)


def half_of_each_page(make: Make) -> None:
    """Eight half-empty pages become four full ones; the rest is free at once, and the next turn finds everything."""
    stage = Ragged(make)
    dropped = stage.drop(range(3, 11))
    free = stage.available()
    req = stage.say(stage.words("prompt", 20))
    assert len(req.intentkv.holes) == dropped == 4 * stage.page == req.intentkv.freed
    assert free - stage.available() == stage.filed(req) - 4
    assert stage.published(text_of(req)) == 3
    assert stage.moved == (2 * stage.page if stage.page > 1 else 0)
    second = stage.say(stage.on(req, "next"))
    assert stage.found(second) == stage.filed(req)
    assert second.intentkv.reused_prefix_tokens == stage.filed(req) * stage.page - dropped
    drain(stage.world)


def one_event_after_another(make: Make) -> None:
    """Packed pages lose single tokens again, turn after turn, in the middle of answers too."""
    stage, dropped, freed, known = Ragged(make), 0, 0, 0
    text = stage.words("prompt", 20)
    for turn in range(8):
        dropped += stage.drop(range(2, 14 + 3 * turn), share=5 - turn // 2)
        req = stage.start(text, new=2 * stage.page)
        assert not turn or stage.found(req) == known
        while not req.finished():
            stage.world.decode([req])
            stage.cache.checkpoint_decoding(req)
            check_world(stage.world)
        freed, known = freed + req.intentkv.freed, stage.filed(req)
        text = stage.on(req, f"turn {turn}")
    assert len(req.intentkv.holes) == dropped
    assert dropped - stage.page < freed <= dropped, "all but the padding of one page"
    assert stage.moved or stage.page == 1


def what_is_left_of_a_page_waits(make: Make) -> None:
    """Less than a page frees nothing yet: it pads the last packed page until the next event frees both parts."""
    stage = Ragged(make)
    stage.wanted["s"] = stage.positions([4])[: stage.page // 2]
    first = stage.say(stage.words("prompt", 12))
    assert first.intentkv.dropped == stage.page // 2 and first.intentkv.freed == 0
    stage.wanted["s"] = np.union1d(stage.wanted["s"], stage.positions([9])[stage.page // 2 :])
    second = stage.say(stage.on(first, "next"))
    assert stage.found(second) == stage.filed(first)
    assert second.intentkv.freed == stage.page


def edited_inside_packed_pages(make: Make) -> None:
    """The text goes another way where its KV lies in the same pages as what it goes away from."""
    stage = Ragged(make)
    stage.drop(range(3, 15), share=3)
    first = stage.say(stage.words("prompt", 20))
    second = stage.say(text_of(first)[: 9 * stage.page] + stage.words("edit", 8))
    assert stage.found(second) == 9
    assert np.array_equal(second.intentkv.holes, stage.wanted["s"])
    again = stage.say(stage.on(second, "on"))
    assert stage.found(again) == stage.filed(second)
    stage.wanted["s"] = np.union1d(stage.wanted["s"], stage.positions([16]))
    third = stage.say(stage.on(again, "and on"))
    assert stage.found(third) == stage.filed(again)
    used = 256 - stage.available()
    live = (stage.filed(third) * stage.page - len(third.intentkv.holes)) / stage.page
    assert live <= used <= live + 2, "what the text went away from gave way, and nothing of it is kept in packed pages"


def edit_while_the_first_way_runs(make: Make) -> None:
    """Two requests of a session read the same packed pages; neither may move or free what the other reads."""
    stage = Ragged(make)
    stage.drop(range(3, 15), share=3)
    first = stage.say(stage.words("prompt", 20))
    one = stage.start(stage.on(first, "one"), new=3 * stage.page)
    other = stage.start(text_of(first)[: 9 * stage.page] + stage.words("edit", 8), new=3 * stage.page)
    assert stage.found(other) == 9
    rows = stage.world.row(one, 22 * stage.page).copy()
    moved = stage.moved
    stage.wanted["s"] = np.union1d(stage.wanted["s"], stage.positions([5, 6, 16]))
    stage.cache.checkpoint_decoding(other)
    check_world(stage.world)
    assert np.array_equal(rows, stage.world.row(one, 22 * stage.page)), "another request's row must not change"
    assert stage.page == 1 or stage.moved - moved < 2 * stage.page, "what both read stays where it is"
    for req in (one, other, one, other):
        stage.world.decode([req])
        check_world(stage.world)
    for req in (one, other):
        while not req.finished():
            stage.world.decode([req])
            check_world(stage.world)
    assert stage.found(stage.say(stage.on(other, "on"))) == stage.filed(other)


def packed_pages_are_evicted(make: Make) -> None:
    """What was packed goes as a whole; the session finds its text up to the first page that is gone."""
    stage = Ragged(make, pages=64)
    stage.drop(range(4, 12))
    first = stage.say(stage.words("prompt", 20))
    stage.world.evict((stage.available() + 3) * stage.page)
    check_world(stage.world)
    second = stage.say(stage.on(first, "next"))
    assert stage.found(second) == (5 if stage.page == 1 else 4), (
        "of the first page of four one position is dropped anyway"
    )
    assert stage.cache.stats()["namespaces_evicted"] == 1
    third = stage.say(stage.on(second, "on"))
    assert stage.found(third) == stage.filed(second)


def mask_finds_what_reclaim_finds(make: Make) -> None:
    """The same holes and the same prefixes, edits inside packed pages included; nothing is moved where nothing is freed."""
    told = []
    for layout in ("mask", "reclaim"):
        stage = Ragged(make, layout=layout)
        stage.drop(range(3, 15), share=3)
        first = stage.say(stage.words("prompt", 20))
        edited = stage.say(text_of(first)[: 9 * stage.page] + stage.words("edit", 8))
        stage.drop(range(12, 16))
        again = stage.say(stage.on(edited, "next"))
        reqs = (first, edited, again)
        told.append([(stage.found(req), text_of(req), req.intentkv.holes.tolist()) for req in reqs])
        assert stage.moved == 0 or (layout, stage.page > 1) == ("reclaim", True)
    assert told[0] == told[1]


def event_in_an_open_free_group(make: Make) -> None:
    stage = Ragged(make, pages=48)
    req = stage.start(stage.words("prompt", 20), new=4)
    stage.drop(range(2, 18))
    stage.world.allocator.free_group_begin()
    stage.cache.checkpoint_decoding(req)
    stage.world.allocator.free_group_end()
    check_world(stage.world)
    assert req.intentkv.freed == 8 * stage.page
    stage.world.retract(req)
    check_world(stage.world)
    assert stage.world.admit(req)
    check_world(stage.world)
    assert stage.found(req) == 20 or stage.found(req) == 19


STORIES = [
    half_of_each_page,
    one_event_after_another,
    what_is_left_of_a_page_waits,
    edited_inside_packed_pages,
    edit_while_the_first_way_runs,
    packed_pages_are_evicted,
    mask_finds_what_reclaim_finds,
    event_in_an_open_free_group,
]
