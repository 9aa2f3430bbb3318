"""BFCL's multi-turn cases, played and judged; `stand_in/` has a package of bfcl-eval's names with a desk to tidy."""

import importlib
import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from intentkv.evals.bfcl_cases import Case, load_cases
from intentkv.evals.bfcl_play import play_case
from intentkv.evals.bfcl_report import bfcl_summaries
from intentkv.evals.bfcl_world import World
from tests.evals.bfcl_model import Calls, answering, true_calls
from tests.evals.fake_server import fake_server

SCRIPT = Path(__file__).resolve().parents[2] / "scripts" / "eval_bfcl.py"
STAND_IN = Path(__file__).resolve().parent / "stand_in"
BOTH = ["multi_turn_base", "multi_turn_miss_func"]


def without_bfcl() -> None:
    for name in [name for name in sys.modules if name.split(".")[0] == "bfcl_eval"]:
        del sys.modules[name]


@pytest.fixture
def cases(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Case]]:
    without_bfcl()
    monkeypatch.syspath_prepend(STAND_IN)
    yield load_cases(BOTH)
    without_bfcl()


def simulators() -> Any:
    return importlib.import_module("bfcl_eval.eval_checker.multi_turn_eval.multi_turn_utils")


def played(case: Case, answer: Any, **params: Any) -> dict[str, Any]:
    with fake_server(answer) as url:
        return play_case(case, url=url, model="m", params=params, max_tokens=64, sglang=True)


def test_cases_become_turns_with_the_tools_there_are(cases: list[Case]) -> None:
    """A function that is held back comes with the turn that has no question; a schema has no types but JSON's."""
    assert [case.name for case in cases] == ["multi_turn_base_0", "multi_turn_base_1", "multi_turn_miss_func_0"]
    assert [case.name for case in load_cases(BOTH, most=1)] == ["multi_turn_base_0", "multi_turn_miss_func_0"]
    assert cases[2].category == "multi_turn_miss_func"
    first, second = cases[2].turns
    assert [[tool["function"]["name"] for tool in turn.tools] for turn in (first, second)] == [
        ["look"],
        ["look", "put"],
    ]
    assert second.messages == ({"role": "user", "content": "There are more functions now."},)
    about = second.tools[1]["function"]
    assert set(about) == {"name", "description", "parameters"}
    schema = about["parameters"]
    assert schema["type"] == "object" and schema["required"] == ["item", "shelf"]
    assert schema["properties"]["weight"]["type"] == "number"
    assert schema["properties"]["marks"]["items"] == {"type": "object", "properties": {"ink": {"type": "string"}}}


def test_true_calls_are_right_and_others_wrong(cases: list[Case]) -> None:
    for case in cases:
        play = played(case, answering(cases))
        assert play["right"] and play["wrong"] == ""
        assert all(turn["completed"] for turn in play["turns"])

        def other(case: Case, body: dict[str, Any]) -> Calls:
            return [(name, {**arguments, "item": "sofa"}) for name, arguments in true_calls(case, body) if arguments]

        play = played(case, answering(cases, other))
        assert not play["right"] and play["wrong"] == "multi_turn:instance_state_mismatch"
        play = played(case, answering(cases, lambda case, body: []))
        assert not play["right"] and play["wrong"] == "multi_turn:empty_turn_model_response"
        assert all(turn["completed"] and turn["requests"] == 1 for turn in play["turns"])
    assert not [name for name in vars(simulators()) if name.startswith("intentkv_play")]


def test_the_model_sees_what_its_calls_brought(cases: list[Case]) -> None:
    """Calls and results stay in the history, under the calls' ids; the sample sums up the turn's requests."""
    bodies: list[dict[str, Any]] = []
    answer = answering(cases)

    def noted(body: dict[str, Any]) -> dict[str, Any]:
        bodies.append(body)
        return answer(body)

    play = played(cases[0], noted, intentkv_scorer="snapkv", intentkv_budget="25%")
    roles = [[message["role"] for message in body["messages"]] for body in bodies]
    turn = ["user", "assistant", "tool", "assistant"]
    assert roles == [turn[:1], turn[:3], [*turn, "user"], [*turn, *turn[:3]]]
    last = bodies[-1]["messages"]
    assert [message["content"] for message in last if message["role"] == "tool"] == [
        "lamp is on 2",
        "{'chair': 9, 'lamp': 2}",
    ]
    assert last[1]["tool_calls"][0]["id"] == last[2]["tool_call_id"] == "call-0"
    assert {body["session_id"] for body in bodies} == {"multi_turn_base_0 intentkv_budget=25% intentkv_scorer=snapkv"}
    assert {json.dumps(body["custom_params"]) for body in bodies} == {
        '{"intentkv_scorer": "snapkv", "intentkv_budget": "25%"}'
    }
    words = [len(json.dumps(body["messages"]).split()) for body in bodies]
    first, second = play["turns"]
    assert first["prompt_tokens"] == sum(words[:2]) and second["prompt_tokens"] == sum(words[2:])
    assert first["logical_tokens"] == words[1] + 8 and first["live_tokens"] == words[1] // 2
    assert first["calls"] == [["put(item='lamp', shelf=2)"]] and first["events"] == 2 and first["answer"] == "Done."


@pytest.mark.parametrize(
    "call",
    [
        ("__import__('os').system", {}),
        ("eval", {"source": "1"}),
        ("_secret", {}),
        ("put", {"item='a', shelf=len(__import__('os').sep)": 1}),
        ("put", {"lambda": 1}),
    ],
)
def test_only_calls_of_the_simulators_are_evaluated(cases: list[Case], call: tuple[str, dict[str, Any]]) -> None:
    """bfcl evaluates a call as Python: a name or an argument's name that is anything else must not get there."""
    simulators().EVALUATED.clear()
    with World(cases[0]) as world:
        written, results = world.run([call, ("put", {"item": "__import__('os')", "shelf": 1})])
        assert written == ["no_such_function()", """put(item="__import__('os')", shelf=1)"""]
        assert results == [f"Error during execution: name {call[0]!r} is not defined", "__import__('os') is on 1"]
        assert world.verdict([[written], []]) == "multi_turn:instance_state_mismatch"
    assert set(simulators().EVALUATED) <= {*written, *cases[0].truth[0]}


def test_a_failing_call_is_told_and_the_turn_goes_on(cases: list[Case]) -> None:
    def tries_first(case: Case, body: dict[str, Any]) -> Calls:
        last = body["messages"][-1]
        if last["role"] == "user" and last["content"].startswith("Put"):
            return [("put", {"item": "lamp", "shelf": 12})]
        if last["role"] == "tool" and "nine shelves" in last["content"]:
            return [("put", {"item": "lamp", "shelf": 2})]
        return true_calls(case, body)

    play = played(cases[0], answering(cases, tries_first))
    assert play["right"] and play["turns"][0]["requests"] == 3


def test_without_end_or_json_or_a_server_that_takes_it(cases: list[Case]) -> None:
    play = played(cases[0], answering(cases, lambda case, body: [("look", {})]))
    assert play["wrong"] == "more than 3 steps in a turn"
    assert [(turn["completed"], len(turn["calls"])) for turn in play["turns"]] == [(False, 4), (False, 0)]

    play = played(cases[0], answering(cases, raw="{'item':"))
    assert play["wrong"] == "multi_turn:empty_turn_model_response" and all(t["completed"] for t in play["turns"])
    play = played(cases[0], answering(cases, raw="[1]"))
    assert play["wrong"] == "multi_turn:empty_turn_model_response"

    play = played(cases[0], lambda body: 400)
    assert "400" in play["wrong"] and not play["right"] and not any(turn["completed"] for turn in play["turns"])

    def stock(body: dict[str, Any]) -> dict[str, Any]:
        return answering(cases)({**body, "custom_params": {}})

    with pytest.raises(ValueError, match="serves without intentkv"):
        played(cases[0], stock, intentkv_scorer="random")


def test_a_case_is_right_as_a_whole() -> None:
    """Accuracy, completion and intervals are of cases; tokens of completed turns."""
    turn = {
        "completed": True, "requests": 1, "calls": [["look()"]], "prompt_tokens": 10, "cached_tokens": 4,
        "logical_tokens": 12, "live_tokens": 6, "rows_read": 48, "score_ms": 1.0, "seconds": 0.5,
    }  # fmt: skip
    lost = {"completed": False, "requests": 0, "calls": []}

    def case(configuration: str, name: str, wrong: str, *turns: dict[str, Any]) -> dict[str, Any]:
        return {
            "configuration": configuration,
            "session": name,
            "right": not wrong,
            "wrong": wrong,
            "turns": list(turns),
        }

    plays = [
        case("full", "multi_turn_base_0", "", turn, turn),
        case("full", "multi_turn_base_1", "", turn, turn),
        case("full", "multi_turn_miss_func_0", "state", turn, turn),
        case("x@25%", "multi_turn_base_0", "", turn, turn),
        case("x@25%", "multi_turn_base_1", "gone", turn, lost),
        case("x@25%", "multi_turn_miss_func_0", "state", turn, turn),
    ]
    figures = bfcl_summaries(plays)
    assert list(figures) == ["full", "x@25%"]
    full, pruned = figures["full"], figures["x@25%"]
    assert full["accuracy"] == pytest.approx(2 / 3) and full["of_full"] is None and full["completion"] == 1
    assert pruned["accuracy"] == pytest.approx(1 / 3) and pruned["of_full"] == pytest.approx(1 / 2)
    assert pruned["completion"] == pytest.approx(2 / 3) and pruned["wrong"] == {"gone": 1, "state": 1}
    assert pruned["by_category"]["multi_turn_base"] == {"accuracy": 0.5, "cases": 2}
    assert pruned["live_mean"] == 6 and pruned["logical_peak"] == 12
    assert pruned["prefix_hit"] == pytest.approx(0.4) and pruned["prefilled_tokens"] == 5 * 6 and pruned["calls"] == 5


def command(url: str, *more: str) -> list[str]:
    arguments = ["--base-url", f"{url}/v1", "--categories", *BOTH, "--scorers", "intent", "random"]
    return [sys.executable, str(SCRIPT), *arguments, "--budgets", "50%", "64", "--out", "result.json", *more]


def without_times(path: Path) -> Any:
    result = json.loads(path.read_text())
    for figures in [*result["summary"].values(), *(turn for play in result["plays"] for turn in play["turns"])]:
        figures.pop("seconds", None)
    return result


@pytest.mark.parametrize("together", ["1", "2"])
def test_killed_half_way_and_started_again_it_writes_the_same_file(
    tmp_path: Path, cases: list[Case], together: str
) -> None:
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    whole.mkdir()
    killed.mkdir()
    requests, reached, goes_on = [0], threading.Event(), threading.Event()
    answer = answering(cases)

    def slow(body: dict[str, Any]) -> dict[str, Any]:
        requests[0] += 1
        if requests[0] == 30:
            reached.set()
            goes_on.wait(60)
        return answer(body)

    environment = {**os.environ, "PYTHONPATH": f"{STAND_IN}:{SCRIPT.parents[1]}"}
    with fake_server(slow) as url:
        line = command(url, "--together", together, "--json")
        process = subprocess.Popen(
            line, cwd=killed, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )
        assert reached.wait(60)
        process.kill()
        process.wait()
        goes_on.set()
        before = (killed / "result.journal").read_text().splitlines()
        assert 1 < len(before) < 1 + 5 * 3 and not (killed / "result.json").exists()
        for folder in (killed, whole):
            run = subprocess.run(line, cwd=folder, env=environment, check=True, capture_output=True, text=True)
    assert without_times(killed / "result.json") == without_times(whole / "result.json")
    summary = json.loads(run.stdout.splitlines()[-1])
    assert list(summary) == ["full", "intent@50%", "intent@64", "random@50%", "random@64"]
    assert all(figures["accuracy"] == 1 and figures["cases"] == 3 for figures in summary.values())
    budgets = {play["configuration"] for play in json.loads((whole / "result.json").read_text())["plays"]}
    assert budgets == set(summary)


def test_without_the_package_it_says_how_to_get_it(tmp_path: Path) -> None:
    hidden = "import sys; sys.modules['bfcl_eval'] = None; import runpy; sys.argv = sys.argv[1:]; "
    line = [sys.executable, "-c", f"{hidden}runpy.run_path(sys.argv[0], run_name='__main__')"]
    run = subprocess.run(
        [*line, *command("http://127.0.0.1:9")[1:]], cwd=tmp_path, check=False, capture_output=True, text=True
    )
    assert run.returncode == 1 and "pip install 'intentkv[bfcl]'" in " ".join(run.stderr.split())
