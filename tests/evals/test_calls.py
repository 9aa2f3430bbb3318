"""Sessions of tool calls: their form, how they are asked for, and the evaluation that plays them, against a fake server."""

import json
import re
from pathlib import Path
from typing import Any

import pytest

from intentkv.evals.agents_report import result_file
from intentkv.evals.calls import CALL, tool_calling
from intentkv.evals.client import play
from intentkv.evals.configurations import Configuration
from intentkv.evals.families import FAMILIES
from intentkv.evals.journal import Journal
from intentkv.evals.plot import by_turn, draw_actkv
from intentkv.evals.sessions import make_session
from intentkv.observe.action_regions import make_detector
from scripts.eval_actkv import OTHERS, mean_budget, play_everything
from tests.evals.fake_server import fake_server, reply

SESSIONS = [tool_calling(make_session(FAMILIES[name], 5, records=2, late=2)) for name in ("travel", "order-desk")]


def call(sentence: str) -> str:
    return f'<tool_call>\n{{"name": "submit", "arguments": {{"sentence": "{sentence}"}}}}\n</tool_call>'


@pytest.mark.parametrize("family", FAMILIES)
def test_only_the_form_of_loads_and_answers_changes(family: str) -> None:
    plain = make_session(FAMILIES[family], 3, forks=1, rewrites=1)
    calling = tool_calling(plain)
    assert calling.regex == CALL and calling.stop is None and calling.name == plain.name
    loads = 0
    for before, after in zip(plain.turns, calling.turns, strict=True):
        assert (after.expected, after.age, after.branch) == (before.expected, before.age, before.branch)
        for old, new in zip(before.messages, after.messages, strict=True):
            if old["role"] != "assistant":
                assert new == old
                continue
            loads += 1
            body = json.loads(new["content"].removeprefix("<tool_call>\n").removesuffix("\n</tool_call>"))
            assert old["content"] == f'{body["name"]}("{body["arguments"]["name"]}")'
    assert loads == 5


@pytest.mark.parametrize(
    ("sentence", "fits"),
    [
        ("The door code of the side gate is 4417.", True),
        ("4417.", False),
        ("The door code of the side gate is 4417", False),
        ("The door code. It is 4417.", False),
        ("The 'door code' is " + "4417" * 30 + ".", False),
    ],
)
def test_the_form_is_one_sentence_in_a_call_of_which_the_detector_sees_all(sentence: str, fits: bool) -> None:
    text = call(sentence)
    assert (re.fullmatch(CALL, text) is not None) == fits
    detector = make_detector("hermes")
    edges = detector.feed(text) + detector.finish()
    assert [(edge.kind, edge.at) for edge in edges] == [("enter", text.index("{") + 1), ("leave", len(text))]


def test_the_form_is_asked_of_every_answer_and_only_of_servers_that_hold_to_it() -> None:
    seen: list[dict[str, Any]] = []

    def answer(body: dict[str, Any]) -> dict[str, Any]:
        seen.append(body)
        return reply(body)

    with fake_server(answer) as url:
        list(play(SESSIONS[0], url))
        assert len(seen) == len(SESSIONS[0].turns) and all(body["regex"] == CALL for body in seen)
        with pytest.raises(ValueError, match="is no SGLang server"):
            next(play(SESSIONS[0], url, sglang=False))
        list(play(make_session(FAMILIES["travel"], 1), url))
        assert "regex" not in seen[-1]


def test_a_budget_of_auto_is_left_to_the_server() -> None:
    auto = Configuration("actkv", "auto", "reclaim")
    assert auto.key == "actkv@auto"
    assert auto.params(2000) == {"intentkv_scorer": "actkv", "intentkv_budget": "auto"}


def test_the_others_get_the_mean_budget_of_auto(tmp_path: Path) -> None:
    """The budget of auto grows by 100 a turn; every other configuration is asked for with what it was on average."""
    seen: list[dict[str, Any]] = []

    def answer(body: dict[str, Any]) -> dict[str, Any]:
        seen.append(body)
        params = body["custom_params"]
        if params.get("intentkv_budget") != "auto":
            return reply(body)
        turn = sum(message["role"] == "assistant" for message in body["messages"])
        made = reply({**body, "custom_params": {**params, "intentkv_budget": 500}})
        made["choices"][0]["meta_info"]["intentkv"] |= {
            "budget_tokens": 500 + 100 * turn,
            "confidence_slope": -0.5 * turn,
            "action_regions": 1,
        }
        return made

    journal = Journal(tmp_path / "j", {})
    with fake_server(answer) as url:
        play_everything(url, SESSIONS, journal, together=1)
    configurations = list(dict.fromkeys(play["configuration"] for play in journal.plays))
    assert configurations[:2] == ["full", "actkv@auto"]
    assert [name.partition("@")[0] for name in configurations[2:]] == list(OTHERS)
    assert len({name.partition("@")[2] for name in configurations[2:]}) == 1

    mean = mean_budget(journal.plays)
    series = by_turn(journal.plays, "actkv@auto", "budget_tokens")
    assert [len(values) for values in series] == [len(session.turns) for session in SESSIONS]
    assert mean == sum(map(sum, series)) / sum(map(len, series))
    asked = {body["custom_params"].get("intentkv_budget") for body in seen} - {None, "auto"}
    # The budget goes through a share of the final context with one decimal.
    final = max(turn["logical_tokens"] for play in journal.plays for turn in play["turns"])
    assert len(asked) == 1 and abs(asked.pop() - mean) <= 0.0005 * final + 0.5

    plan = {"model": "fake", "sessions": 2}
    result = result_file(plan, journal.plays)
    assert {f"{OTHERS[0]}@{name.partition('@')[2]} - {name}" for name in configurations[3:]} == set(
        result["comparisons"]
    )
    pictures = []
    for name in ("a.png", "b.png"):
        draw_actkv(result, tmp_path / name)
        pictures.append((tmp_path / name).read_bytes())
    assert pictures[0] == pictures[1] and pictures[0].startswith(b"\x89PNG")
