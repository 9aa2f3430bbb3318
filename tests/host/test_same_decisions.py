"""What a session keeps follows from its own text and the settings: not from the layout, nor from how it was scheduled.

The same conversations are served by schedulers of different habits. Some share every chunk with others, launch a step
before they have seen the last one's result, and retract now and then. Answers and holes must be the same, token for token.
"""

from __future__ import annotations

import random
import zlib

import numpy as np
import pytest

from tests.host.checks import drain
from tests.host.pools import publish_settings
from tests.host.session_world import VOCABULARY, SessionWorld

publish_settings()
Told = list[tuple[list[int], list[int]]]  # of every request: answer, holes


def make_world(
    scorer: str, page_size: int, layout: str, habits: random.Random | None, core: str = "rust"
) -> SessionWorld:
    return SessionWorld(
        *(core, page_size, 8192 * page_size),
        scorer=scorer,
        layout=layout,
        chunk=96,
        context=4096,
        budget=48,
        trigger=16,
        habits=habits,
    )


def words(name: str, count: int) -> list[int]:
    return np.random.default_rng(zlib.crc32(name.encode())).integers(0, VOCABULARY, count).tolist()


def tell(world: SessionWorld, order: list[str]) -> dict[str, Told]:
    """Three agents of five turns each, taken in `order`, over one system prompt; each forks once. Messages begin alike."""
    told: dict[str, Told] = {name: [] for name in (*order, *(f"{name} fork" for name in order))}
    texts = {name: words("system", 30) for name in order}
    for turn in range(5):
        for name in order:
            message = words("opening", 20) + words(f"{name} {turn}", 150 if turn % 2 else 60)
            # Long answers, a short one that ends before its page does, and one that ends where an event would be due.
            req = world.serve(world.ask(name, texts[name], message, new=(40, 3, 48, 1, 33)[turn]))
            told[name].append((list(req.output_ids), req.intentkv.holes.tolist()))
            texts[name] = texts[name] + message + list(req.output_ids)
            if turn == 3:
                req = world.serve(world.ask(f"{name} fork", texts[name], words("count", 30), new=5))
                told[f"{name} fork"].append((list(req.output_ids), req.intentkv.holes.tolist()))
    drain(world)
    assert world.cache.audit() == []
    return told


# One scorer that watches queries, which a token found in the cache does not show, and one that reads keys alone.
@pytest.mark.parametrize("scorer", ["intent-rescaled", "keydiff"])
@pytest.mark.parametrize("page_size", [1, 16])
def test_same_decisions_however_it_is_scheduled(page_size: int, scorer: str) -> None:
    names = ["anna", "bert", "carl"]
    expected = tell(make_world(scorer, page_size, "mask", None), names)
    assert min(len(holes) for told in expected.values() for _, holes in told[-1:]) > 100
    retractions = 0
    for seed in range(6):
        draw = random.Random(seed)
        world = make_world(
            scorer, page_size, "reclaim" if seed % 3 else "mask", draw, "python" if seed == 5 else "rust"
        )
        told = tell(world, draw.sample(names, 3))
        for name in expected:
            for turn, (before, now) in enumerate(zip(expected[name], told[name], strict=True)):
                assert now[1] == before[1], f"seed {seed}: {name} keeps other tokens in turn {turn}"
                assert now[0] == before[0], f"seed {seed}: {name} answers differently in turn {turn}"
        retractions += world.retractions
    assert retractions > 50


@pytest.mark.parametrize("layout", ["reclaim", "mask"])
def test_a_choice_is_out_of_date_once_a_parallel_call_has_dropped_more(layout: str) -> None:
    """A request is retracted with an event that waits for the end of its page; what it chose is dropped by another meanwhile."""
    world = make_world("keydiff", 16, layout, None)
    text = words("system", 30) + words("history", 150)
    first = world.serve(world.ask("anna", text, words("first", 20), new=3))
    text += words("first", 20) + list(first.output_ids)
    waits = world.ask("anna", text, words("second", 60), new=60)
    assert world.admit(waits)
    while waits in world.prefilling:
        world.next_chunk(waits)
    while waits.intentkv.pending is None:
        world.decode([waits])
    chosen = waits.intentkv.pending.drop
    world.retract(waits)
    text += words("second", 60) + list(waits.output_ids)[:5]
    world.serve(world.ask("anna", text, words("parallel", 200), new=3))
    assert world.admit(waits)
    found = waits.intentkv.holes
    assert np.isin(chosen, found).all() and waits.intentkv.pending is None
    before = waits.intentkv.dropped
    world.serve(waits)
    assert waits.intentkv.dropped - before == len(waits.intentkv.holes) - len(found)
    drain(world)
    assert world.cache.audit() == []
