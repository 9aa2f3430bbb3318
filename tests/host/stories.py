"""Short lives of one or two sessions, in pages so that they read the same for pages of 1 and of 16 tokens.

A story takes a function that makes a `World`, lets things happen, checks all invariants after each step, and asserts
what the session finds and what the pool gets back. `test_reclaim` runs every story on both tree cores;
`test_planted_faults` breaks the cache in many ways and expects some story to notice.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterable

import numpy as np
from sglang.srt.managers.schedule_batch import Req

from intentkv.apply.rows import page_floor
from tests.host.checks import check_text, check_world
from tests.host.world import World

Make = Callable[..., World]


class Stage:
    """A world, the pages that each session drops, and words to say."""

    def __init__(self, make: Make, pages: int = 256, chunk: int = 1 << 20, **options: object) -> None:
        self.world = make(pages=pages, chunk=chunk, **options)
        self.cache, self.page = self.world.cache, self.world.page_size
        self.drops: dict[str, list[int]] = {}
        self.world.decide = lambda req, length: self.positions(self.drops.get(req.intentkv.session, ()))

    def positions(self, pages: Iterable[int]) -> np.ndarray:
        """All positions of some pages."""
        return np.array([page * self.page + i for page in pages for i in range(self.page)], dtype=np.int64)

    def words(self, name: str, pages: int) -> list[int]:
        """Tokens that no other name has."""
        return np.random.default_rng(zlib.crc32(name.encode())).integers(10, 1 << 20, pages * self.page).tolist()

    def say(self, tokens: list[int], session: str | None = "s", new: int = 2, **scope: str) -> Req:
        """One request from beginning to end."""
        req = self.world.serve(self.world.request(tokens, session, new, **scope))
        check_world(self.world)
        return req

    def start(self, tokens: list[int], session: str | None = "s", new: int = 64) -> Req:
        """A request that is left decoding."""
        req = self.world.request(tokens, session, new)
        assert self.world.admit(req)
        check_world(self.world)
        return req

    def found(self, req: Req) -> int:
        """Pages of its prompt that a request found, when it was admitted last."""
        assert self.world.found[req.rid] % self.page == 0
        return self.world.found[req.rid] // self.page

    def available(self) -> int:
        """Pages free."""
        return self.world.allocator.available_size() // self.page

    def filed(self, req: Req) -> int:
        """Pages that a finished request leaves behind: its last token has no KV, and a part of a page is not kept."""
        return page_floor(len(text_of(req)) - 1, self.page) // self.page

    def published(self, tokens: list[int]) -> int:
        """Pages that anybody finds for a text."""
        return check_text(self.world, tokens) // self.page


def text_of(req: Req) -> list[int]:
    return list(req.origin_input_ids + req.output_ids)


def first_event_frees_at_once(make: Make) -> None:
    stage = Stage(make)
    stage.drops["s"] = [3, 4, 5, 9]
    before = stage.available()
    req = stage.say(stage.words("prompt", 20))
    assert len(req.intentkv.holes) == req.intentkv.dropped == req.intentkv.freed == 4 * stage.page
    assert stage.available() + stage.cache.evictable_size() // stage.page == before
    assert stage.cache.evictable_size() // stage.page == stage.filed(req) - 4
    assert stage.published(text_of(req)) == 3, "the text's own key ends at the first hole"
    stage.start(stage.words("stranger", 20), None)  # in the same row, which has no holes now


def next_turn_finds_everything(make: Make) -> None:
    stage = Stage(make)
    text, known = stage.words("prompt", 20), 0
    for turn in range(6):
        stage.drops["s"] = stage.drops.get("s", []) + [3 + 3 * turn, 4 + 3 * turn]
        req = stage.say(text, new=3)
        if turn:
            assert stage.found(req) == known, "a turn finds all that the turn before left"
            holes = 2 * turn * stage.page
            assert req.intentkv.reused_prefix_tokens == known * stage.page - holes
        assert req.intentkv.freed == 2 * stage.page
        known = stage.filed(req)
        text = text_of(req) + stage.words(f"turn {turn}", 5)


def mask_frees_nothing_and_finds_everything(make: Make) -> None:
    stage = Stage(make, layout="mask")
    stage.drops["s"] = [3, 4, 5]
    first = stage.say(stage.words("prompt", 20))
    assert first.intentkv.dropped == 3 * stage.page and first.intentkv.freed == 0
    assert stage.cache.evictable_size() // stage.page == stage.filed(first)
    assert stage.published(text_of(first)) == 3, "others find what they would find where memory is freed"
    stage.drops["s"] += [10, 21]
    second = stage.say(text_of(first) + stage.words("more", 5))
    assert stage.found(second) == stage.filed(first)
    third = stage.say(text_of(second) + stage.words("and more", 5))
    assert stage.found(third) == stage.filed(second)
    assert len(third.intentkv.holes) == 5 * stage.page and third.intentkv.freed == 0
    assert stage.cache.evictable_size() // stage.page == stage.filed(third), "dropped tokens stay in the namespace"
    assert stage.published(text_of(third)) == 3


def tokens_behind_holes_are_private(make: Make) -> None:
    stage = Stage(make)
    stage.drops["s"] = [6]
    req = stage.start(stage.words("prompt", 12), new=3 * stage.page)
    while not req.finished():
        stage.world.decode([req])
        check_world(stage.world)
        assert stage.published(text_of(req)) <= 6
    assert stage.published(text_of(req)) == 6
    other = stage.say(text_of(req) + stage.words("copy", 2), session="thief")
    assert stage.found(other) == 6, "the same text, in another session, must not inherit holes"


def same_words_after_a_hole(make: Make) -> None:
    """A branch that says, in place of the dropped page, what followed it."""
    stage = Stage(make)
    stage.drops["s"] = [3, 6]
    head, after = stage.words("head", 6), stage.words("after", 3)
    first = stage.say(head + stage.words("gone", 1) + after)
    stage.drops["s"] = []
    branch = stage.say(head + after + stage.words("on", 1))
    assert stage.found(branch) == 6
    assert branch.intentkv.holes.tolist() == stage.positions([3]).tolist()
    again = stage.say(text_of(first) + stage.words("more", 1))
    assert stage.found(again) == stage.filed(first)


def dropping_twice_changes_nothing(make: Make) -> None:
    stage = Stage(make)
    stage.drops["s"] = [2, 3]
    req = stage.start(stage.words("prompt", 10))
    row, free = stage.world.row(req, 10 * stage.page).copy(), stage.available()
    assert stage.cache.checkpoint_decoding(req) == 0
    assert np.array_equal(row, stage.world.row(req, 10 * stage.page)) and free == stage.available()


def last_page_stays(make: Make) -> None:
    stage = Stage(make)
    stage.world.decide = lambda req, length: np.arange(stage.page // 2, length + 50)
    req = stage.start(stage.words("prompt", 8))
    assert req.intentkv.holes.tolist() == list(range(stage.page // 2, 7 * stage.page))
    for _ in range(2 * stage.page):
        stage.world.decode([req])
        check_world(stage.world)


def parts_of_pages_stay_where_attention_reads_whole_ones(make: Make) -> None:
    stage = Stage(make)
    stage.cache.whole_pages = True
    stage.world.decide = lambda req, length: np.arange(stage.page // 2, length + 50)
    req = stage.start(stage.words("prompt", 8))
    first = 1 if stage.page > 1 else 0  # half of the first page was asked for: it stays
    assert req.intentkv.holes.tolist() == list(range(first * stage.page, 7 * stage.page))
    for _ in range(2 * stage.page):
        stage.world.decode([req])
        check_world(stage.world)


def prune_while_decoding(make: Make) -> None:
    stage = Stage(make)
    req = stage.start(stage.words("prompt", 10), new=4 * stage.page)
    for step in range(2 * stage.page):
        stage.world.decode([req])
        if step % 3 == 0:
            stage.drops["s"] = list(range(2, 4 + step // stage.page))
            stage.cache.checkpoint_decoding(req)
        check_world(stage.world)
    while not req.finished():
        stage.world.decode([req])
    check_world(stage.world)
    again = stage.say(text_of(req) + stage.words("more", 2))
    assert stage.found(again) == stage.filed(req)
    assert stage.cache.checkpoint_decoding(req) == 0, "a finished request has no row to prune"


def prompt_larger_than_the_pool(make: Make) -> None:
    """With an event after each chunk, four pools full of text pass through one; the next turn finds what is left."""
    stage = Stage(make, pages=64, chunk=8)
    req = stage.world.request(stage.words("prompt", 256), "s", new=2)
    assert not stage.world.admit(req), "nobody has said yet that this session stays small"
    keep_first, keep_last = 4, 10
    stage.cache.peak = lambda req, length: (keep_first + keep_last + 8) * stage.page
    stage.world.decide = lambda req, length: stage.positions(range(keep_first, length // stage.page - keep_last))
    assert stage.world.admit(req)
    most = 0
    while req in stage.world.prefilling:
        stage.world.next_chunk(req)
        check_world(stage.world)
        most = max(most, 64 - stage.available())
    assert most <= keep_first + keep_last + 8 + 1, f"{most} pages were in use at once"
    while not req.finished():
        stage.world.decode([req])
    assert stage.found(stage.say(text_of(req) + stage.words("more", 1))) == stage.filed(req)


def prompt_that_drops_too_little(make: Make) -> None:
    """A session that promised to stay small and does not is aborted; the pool is whole, and the server lives on."""
    stage = Stage(make, pages=64, chunk=8)
    stage.cache.peak = lambda req, length: 16 * stage.page
    req = stage.start(stage.words("prompt", 256), new=2)
    while req in stage.world.prefilling:
        stage.world.next_chunk(req)
        check_world(stage.world)
    assert req.finished() and "intentkv_budget" in req.discard_output_reason.message
    stage.world.evict(stage.world.size)
    assert stage.available() == 64


def long_prompt_waits_for_others(make: Make) -> None:
    """A chunk that does not fit now is put off, not forced, while a request that decodes will give memory back."""
    stage = Stage(make, pages=64, chunk=10)
    stage.cache.peak = lambda req, length: 28 * stage.page
    stage.world.decide = lambda req, length: stage.positions(range(4, length // stage.page - 16))
    req = stage.start(stage.words("prompt", 128), new=1)
    for i in range(5):
        stage.start(stage.words(f"other {i}", 9), None, new=2)
    waited = False
    while req in stage.world.prefilling:
        before = req.extend_end
        stage.world.next_chunk(req)
        check_world(stage.world)
        if req.extend_end == before:
            waited = True
            assert stage.world.running, "nobody is left to wait for"
            stage.world.decode(stage.world.running[:1])
    assert waited and req.finished() and req.discard_output_reason is None


STORIES = [
    first_event_frees_at_once,
    next_turn_finds_everything,
    mask_frees_nothing_and_finds_everything,
    tokens_behind_holes_are_private,
    same_words_after_a_hole,
    dropping_twice_changes_nothing,
    last_page_stays,
    parts_of_pages_stay_where_attention_reads_whole_ones,
    prune_while_decoding,
    prompt_larger_than_the_pool,
    prompt_that_drops_too_little,
    long_prompt_waits_for_others,
]
