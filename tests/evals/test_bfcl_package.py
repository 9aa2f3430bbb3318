"""The real package `bfcl-eval`, an optional extra: every multi-turn case played by a model that knows the true calls."""

from collections import Counter
from typing import Any

import pytest

from intentkv.evals.bfcl_cases import CATEGORIES, Case, load_cases
from intentkv.evals.bfcl_play import play_case
from intentkv.evals.bfcl_world import World
from tests.evals.bfcl_model import Calls, answering, true_calls
from tests.evals.fake_server import fake_server

pytest.importorskip(
    "bfcl_eval.utils",
    reason="bfcl-eval is an optional extra that no lock file has: pip install --no-deps bfcl-eval, then run this again",
)


def test_every_case_becomes_turns() -> None:
    cases = load_cases(CATEGORIES)
    assert Counter(case.category for case in cases) == dict.fromkeys(CATEGORIES, 200)
    assert all(len(case.turns) == len(case.truth) for case in cases)
    assert all(turn.messages and turn.tools for case in cases for turn in case.turns)
    held_back = [case for case in cases if case.category == "multi_turn_miss_func"]
    assert all(len(case.turns[0].tools) < len(case.turns[-1].tools) for case in held_back)


def test_true_calls_are_right_and_wrong_ones_are_not() -> None:
    """The first twelve cases of each category, over HTTP."""
    cases = load_cases(CATEGORIES, most=12)

    def changed(case: Case, body: dict[str, Any]) -> Calls:
        return [(name, {key: "nothing of it" for key in arguments}) for name, arguments in true_calls(case, body)]

    for calls, right in ((true_calls, True), (changed, False)):
        with fake_server(answering(cases, calls)) as url:
            verdicts = [play_case(case, url=url, model="m", params={}, max_tokens=64, sglang=True) for case in cases]
        assert [
            (case.name, verdict["wrong"])
            for case, verdict in zip(cases, verdicts, strict=True)
            if verdict["right"] != right
        ] == []


def test_the_long_context_fills_the_simulators() -> None:
    (short,), (long,) = (load_cases([category], most=1) for category in ("multi_turn_base", "multi_turn_long_context"))
    lengths = []
    for case in (short, long):
        with World(case) as world:
            lengths.append(sum(map(len, world.run([("ls", {"a": True}), ("find", {"path": ".", "name": ""})])[1])))
    assert lengths[1] > 5 * lengths[0]
