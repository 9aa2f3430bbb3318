"""A session that was forgotten leaves nothing in the process: no object, no array, no tensor."""

from __future__ import annotations

import gc
import types
import zlib
from collections import Counter

import numpy as np
import pytest
from sglang.srt.managers.schedule_batch import Req

from intentkv.apply.guard import SharedText
from intentkv.config import Budget
from tests.host.checks import drain
from tests.host.pools import publish_settings
from tests.host.session_world import VOCABULARY, SessionWorld

publish_settings()

REMEMBERED = 8
BEFORE, MORE = 24, 48  # sessions
CODE = type | types.ModuleType | types.FunctionType | types.BuiltinFunctionType | types.FrameType


def words(name: str, count: int) -> list[int]:
    return np.random.default_rng(zlib.crc32(name.encode())).integers(0, VOCABULARY, count).tolist()


def ask(world: SessionWorld, session: str, history: list[int], message: list[int], budget: Budget) -> Req:
    """A request as `open_request` would let it in."""
    req = world.ask(session, history, message, new=6)
    req.intentkv.budget = budget
    world.runtime.states[req.rid] = req.intentkv
    world.runtime.open_session(req.intentkv, req.intentkv.prompt)
    return req


def live_through(world: SessionWorld, sessions: range) -> int:
    """Sessions of every kind, one after the other: fixed budgets and `auto`, forks, aborts. Returns the
    positions dropped."""
    dropped = 0
    system = words("system", 20)
    for number in sessions:
        name = f"session {number}"
        budget = Budget("auto", 512) if number % 3 == 0 else Budget("fixed", 32)
        text = system + words(f"{name} first", 60)
        first = world.serve(ask(world, name, system, text[20:], budget))
        text += list(first.output_ids)
        for end in ("second", "fork"):
            later = world.serve(ask(world, name, text, words(f"{name} {end}", 40), budget))
            dropped += later.intentkv.dropped
        if number % 4 == 0:
            gone = ask(world, name, text, words(f"{name} gone", 40), budget)
            assert world.admit(gone)
            world.abort(gone)
        if budget.kind == "auto":
            world.runtime.budgets.observe(name, 1.0)
    return dropped


def held(world: SessionWorld) -> Counter[type]:
    """Objects by type that the runtime and the cache lead to, arrays and tensors among them, once nothing runs."""
    drain(world)
    gc.collect()
    known: dict[int, object] = {}
    found: list[object] = [world.runtime, world.cache]
    while found:
        thing = found.pop()
        if id(thing) not in known and not isinstance(thing, CODE):
            known[id(thing)] = thing
            found.extend(gc.get_referents(thing))
    return Counter(type(thing) for thing in known.values())


def left_behind(scorer: str, remembered: int) -> Counter[type]:
    """What MORE sessions have added to a scheduler that had served BEFORE."""
    world = SessionWorld(*("rust", 1, 4096), scorer=scorer, budget=32, trigger=16, chunk=64, max_sessions=remembered)
    world.cache.records.max_sessions = remembered
    world.cache.guard = SharedText(remembered)
    assert live_through(world, range(BEFORE)) > 0
    before = held(world)
    live_through(world, range(BEFORE, BEFORE + MORE))
    return held(world) - before


@pytest.mark.parametrize("scorer", ["intent-rescaled", "actkv"])
def test_nothing_is_left_of_a_forgotten_session(scorer: str) -> None:
    left = left_behind(scorer, REMEMBERED)
    del left[int]  # counters that have left the range of numbers that Python shares
    assert not left, left


def test_what_is_remembered_would_be_noticed() -> None:
    left = left_behind("intent-rescaled", 2 * (BEFORE + MORE))
    assert left[np.ndarray] >= MORE
