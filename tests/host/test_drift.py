"""A chat template that strips earlier `<think>` text: each turn's prompt leaves the text of the turn before at its answer.

The session, its memory and its holes go on up to there; what follows is computed again, and the text that was left behind
costs no memory.
"""

from __future__ import annotations

import itertools
import random

import numpy as np
import pytest
import torch
from sglang.srt.managers.schedule_batch import Req

from intentkv.apply.rows import below, common_prefix, page_floor
from intentkv.config import Settings
from tests.host.checks import drain
from tests.host.pools import publish_settings
from tests.host.session_world import SessionWorld
from tests.host.test_same_decisions import make_world, words

publish_settings()
THINK = 24  # tokens of an answer that later prompts do not have
SCORER = "intent-rescaled"  # reads the memory
STYLES = {
    "every answer": 1,
    "whole rounds": 3,
}  # turns whose thoughts a template keeps, as Qwen3's does while tools are called


MESSAGES = [words(f"message {turn}", 80 + 16 * (turn % 3)) for turn in range(9)]


def play(world: SessionWorld, style: str) -> list[Req]:
    """One session of nine turns, each prompt with what the template leaves of the answers before it."""
    served: list[Req] = []
    for turn, message in enumerate(MESSAGES):
        history = words("system", 30)
        stripped = turn // STYLES[style] * STYLES[style]  # answers that come without their thoughts
        for number, req in enumerate(served):
            history += MESSAGES[number] + list(req.output_ids)[THINK if number < stripped else 0 :]
        served.append(world.serve(world.ask("agent", history, message, new=THINK + 8)))
    return served


@pytest.mark.parametrize("page_size", [1, 16])
@pytest.mark.parametrize("style", STYLES)
def test_all_before_the_stripped_thoughts_is_used_and_the_rest_computed_again(style: str, page_size: int) -> None:
    world = make_world(SCORER, page_size, "reclaim", None)
    served = play(world, style)
    texts = [np.array(req.origin_input_ids + req.output_ids) for req in served]
    drifted = 0
    for before, now in itertools.pairwise(range(len(served))):
        same = common_prefix(texts[before], np.array(served[now].origin_input_ids))
        drifted += same < len(texts[before])
        known = page_floor(min(same, len(texts[before]) - 1), page_size)  # an answer's last token is not filed
        assert world.found[served[now].rid] == known, f"turn {now}"
        kept = below(served[before].intentkv.holes, known)
        assert np.isin(kept, served[now].intentkv.holes).all(), f"turn {now} reads again what was dropped"
    assert drifted >= 2
    assert sum(len(req.intentkv.holes) > 0 for req in served) >= 5
    for req in served:
        # More than was dropped where a packed page had tokens of the text that was left behind, too.
        more = req.intentkv.freed - req.intentkv.dropped
        assert more == 0 or (page_size > 1 and more > 0), "texts that were left behind gave way"


@pytest.mark.parametrize("style", STYLES)
def test_the_memory_of_the_session_goes_on(style: str) -> None:
    world = make_world(SCORER, 1, "reclaim", None)
    turns = [req.intentkv.turn for req in play(world, style)]
    assert len(world.runtime.scoring.memory) == 1
    kept = float(np.exp(-Settings().memory_decay))
    for before, now in itertools.pairwise(turns):
        expected = torch.nn.functional.normalize(kept * before.memory + now.query, dim=-1)
        torch.testing.assert_close(now.memory, expected)


@pytest.mark.parametrize("page_size", [1, 16])
@pytest.mark.parametrize("style", STYLES)
def test_the_same_answers_and_holes_however_it_is_scheduled(style: str, page_size: int) -> None:
    expected = play(make_world(SCORER, page_size, "mask", None), style)
    for seed in range(3):
        world = make_world(
            SCORER, page_size, "reclaim" if seed else "mask", random.Random(seed), "python" if seed == 2 else "rust"
        )
        for turn, (one, other) in enumerate(zip(expected, play(world, style), strict=True)):
            assert list(other.output_ids) == list(one.output_ids), f"seed {seed}, turn {turn}"
            assert np.array_equal(other.intentkv.holes, one.intentkv.holes), f"seed {seed}, turn {turn}"
        drain(world)
        assert world.cache.audit() == []
