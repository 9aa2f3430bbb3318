"""The recipe of docs/baselines.md for compaction as published: a salt a turn, so nothing is reused and every turn is ranked anew."""

from __future__ import annotations

from functools import partial

import pytest

from intentkv.observe.session import session_key
from tests.host.pools import publish_settings
from tests.host.stories import Stage, text_of
from tests.host.test_reclaim import make_world

publish_settings()


def key(salt: str | None) -> str:
    """The session under which the cache files what an agent's request leaves."""
    made = session_key(
        session_id="agent",
        span_tokens=None,
        prompt_ids=[],
        first_user_end=None,
        extra_key=None,
        cache_salt=salt,
        rid="r",
    )
    return made.value


@pytest.mark.parametrize(("core", "page_size"), [("rust", 1), ("python", 1), ("rust", 16)])
def test_a_salt_a_turn_reuses_nothing_and_frees_at_once(core: str, page_size: int) -> None:
    """Four turns of a growing text in a pool that holds two of them: each computes all of its prompt, holes and all gone, drops
    four pages once, and has them back before it generates."""
    stage = Stage(partial(make_world, core, page_size), pages=64)
    text = stage.words("prompt", 20)
    for turn in range(4):
        salt = f"turn-{turn}"
        stage.drops = {key(salt): [3, 4, 5, 9]}
        req = stage.say(text, key(salt), new=2 * stage.page, salt=salt)
        assert stage.found(req) == 0
        assert req.intentkv.dropped == req.intentkv.freed == 4 * stage.page
        assert req.intentkv.reused_prefix_tokens == 0
        text = text_of(req) + stage.words(f"turn {turn}", 3)


def test_without_salts_the_same_turns_reuse_their_past() -> None:
    """The control: one session key, so each turn finds what the last one left, with its holes."""
    stage = Stage(partial(make_world, "rust", 1), pages=64)
    stage.drops = {key(None): [3, 4, 5, 9]}
    first = stage.say(stage.words("prompt", 20), key(None))
    second = stage.say(text_of(first) + stage.words("more", 3), key(None))
    assert stage.found(second) == stage.filed(first)
    assert second.intentkv.dropped == 0


def test_sessions_never_meet_across_salts() -> None:
    assert len({key(None), key("turn-0"), key("turn-1")}) == 3
