"""The whole evaluation against a fake server: resumed it ends with the same file, and what fails counts as wrong."""

import json
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest

from intentkv.evals.agents_report import summaries
from intentkv.evals.configurations import Configuration, by_layout, layout_flags
from intentkv.evals.families import FAMILIES
from intentkv.evals.journal import Journal
from intentkv.evals.plot import draw_agents, lines
from intentkv.evals.runner import mean_final_tokens, play_all
from intentkv.evals.sessions import make_session
from tests.evals.fake_server import fake_server, reply

SCRIPT = Path(__file__).resolve().parents[2] / "scripts" / "eval_agents.py"
SESSIONS = [make_session(family, 5, forks=1, rewrites=1) for family in FAMILIES.values()]


def command(url: str, *more: str) -> list[str]:
    arguments = ["--base-url", url, "--sessions", "4", "--scorers", "intent", "random", "--budgets", "50", "12"]
    return [sys.executable, str(SCRIPT), *arguments, "--out", "result.json", *more]


def without_times(path: Path) -> Any:
    """The result with the only thing that two runs need not share taken out: how long the requests took."""
    result = json.loads(path.read_text())
    for figures in list(result["summary"].values())[1:]:
        del figures["seconds"]
    for play in result["plays"]:
        for turn in play["turns"]:
            del turn["seconds"]
    return result


def test_killed_half_way_and_started_again_it_writes_the_same_file(tmp_path: Path) -> None:
    """SIGKILL in the middle of a session, and a half-written line at the journal's end, as a full disk leaves one."""
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    whole.mkdir()
    killed.mkdir()
    requests, reached, goes_on = [0], threading.Event(), threading.Event()

    def answer(body: dict[str, Any]) -> dict[str, Any]:
        requests[0] += 1
        if requests[0] == 107:
            reached.set()
            goes_on.wait(60)
        return reply(body)

    with fake_server(answer) as url:
        process = subprocess.Popen(command(url), cwd=killed, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        assert reached.wait(120)
        process.kill()
        process.wait()
        goes_on.set()
        journal = killed / "result.journal"
        before = journal.read_text().splitlines()
        assert 1 < len(before) < 1 + 5 * 4 and not (killed / "result.json").exists()
        with open(journal, "a") as file:
            file.write('{"configuration": "random@12%", "sess')
        start = requests[0]
        subprocess.run(command(url), cwd=killed, check=True, capture_output=True)
        again = requests[0] - start
        start = requests[0]
        subprocess.run(command(url), cwd=whole, check=True, capture_output=True)
        assert again == requests[0] - start - sum(len(json.loads(line)["turns"]) for line in before[1:])
        assert journal.read_text().splitlines()[: len(before)] == before
        assert without_times(killed / "result.json") == without_times(whole / "result.json")
        other = subprocess.run(command(url, "--seed", "9"), check=False, cwd=whole, capture_output=True, text=True)
        assert other.returncode == 1 and "holds another evaluation" in other.stderr


def test_the_result_file_says_where_it_comes_from_and_holds_every_sample(tmp_path: Path) -> None:
    with fake_server() as url:
        run = subprocess.run(command(url, "--json"), cwd=tmp_path, check=True, capture_output=True, text=True)
    result = json.loads((tmp_path / "result.json").read_text())
    assert set(result) == {
        "kind", "command", "commit", "versions", "machine", "plan", "summary", "comparisons", "plays",
    }  # fmt: skip
    assert result["command"].startswith("python scripts/eval_agents.py --base-url")
    assert result["plan"]["seed"] == 300 and result["plan"]["sessions"] == 4
    assert json.loads(run.stdout.splitlines()[-1]) == result["summary"]
    keys = ["full", "full@100%", "intent@50%", "intent@12%", "random@50%", "random@12%"]
    assert list(result["summary"]) == keys
    assert result["summary"]["full"] == 1.0
    for key in keys[2:]:
        turns = [turn for play in result["plays"] if play["configuration"] == key for turn in play["turns"]]
        assert len(turns) == sum(1 for play in result["plays"][:4] for _ in play["turns"]) == 40
        assert result["summary"][key]["accuracy"] == sum(turn["right"] for turn in turns) / len(turns)
    intent, random = (result["summary"][key]["accuracy"] for key in ("intent@12%", "random@12%"))
    difference = result["comparisons"]["intent@12% - random@12%"]
    assert difference["difference"] == pytest.approx(intent - random)
    assert difference["ci"][0] <= difference["difference"] <= difference["ci"][1]

    drawn = lines(result["summary"])
    assert list(drawn) == ["intent", "random"]
    assert all([p["live_mean"] for p in points] == sorted(p["live_mean"] for p in points) for points in drawn.values())
    pictures = []
    for name in ("a.png", "b.png"):
        draw_agents(result, tmp_path / name)
        pictures.append((tmp_path / name).read_bytes())
    assert pictures[0] == pictures[1] and pictures[0].startswith(b"\x89PNG")


def test_budgets_are_one_number_for_all_sessions_and_sessions_are_told_apart(tmp_path: Path) -> None:
    """The same budget in every request of a configuration; ids that no two configurations or branches share."""
    seen: list[dict[str, Any]] = []

    def answer(body: dict[str, Any]) -> dict[str, Any]:
        seen.append(body)
        return reply(body)

    plan = by_layout(["random"], [50, 12], ["reclaim"])["reclaim"]
    assert [configuration.key for configuration in plan] == ["full", "random@50%", "random@12%"]
    assert Configuration("random", 12, "mask").key == "random@12%/mask"
    journal = Journal(tmp_path / "j", {})
    with fake_server(answer) as url:
        play_all(url, plan, SESSIONS, journal)
    ends = [
        max(turn["logical_tokens"] for turn in play["turns"] if not turn["branch"])
        for play in journal.plays[: len(SESSIONS)]
    ]
    mean = sum(ends) / len(SESSIONS)
    assert len(set(ends)) > 1 and mean_final_tokens(journal, [s.name for s in SESSIONS]) == mean
    budgets = [body["custom_params"].get("intentkv_budget") for body in seen]
    turns = sum(len(session.turns) for session in SESSIONS)
    assert budgets == [None] * turns + [round(mean / 2)] * turns + [round(mean * 0.12)] * turns
    assert all(body["custom_params"] == {"intentkv_enabled": False} for body in seen[:turns])
    assert len({body["session_id"] for body in seen}) == 3 * len(SESSIONS) * 2


def test_sessions_at_once_are_noted_in_order(tmp_path: Path) -> None:
    """The first turns of three sessions wait for each other, and the journal is that of one session after the other."""
    meet = threading.Barrier(3, timeout=60)

    def waits(body: dict[str, Any]) -> dict[str, Any]:
        if len(body["messages"]) == 5 and body["custom_params"].get("intentkv_budget"):
            meet.wait()
        return reply(body)

    plan = by_layout(["random"], [50], ["reclaim"])["reclaim"]
    plays = []
    for together, answer in ((1, reply), (3, waits)):
        journal = Journal(tmp_path / str(together), {})
        with fake_server(answer) as url:
            play_all(url, plan, SESSIONS[:3], journal, together=together)
        plays.append([(p["configuration"], p["session"], [t["answer"] for t in p["turns"]]) for p in journal.plays])
    assert plays[0] == plays[1]


def published(events: int = 1, cached: int = 0) -> tuple[list[dict[str, Any]], Any]:
    """The bodies that arrive, and an answer of a server that reuses `cached` tokens and drops `events` times a turn."""
    seen: list[dict[str, Any]] = []

    def answer(body: dict[str, Any]) -> dict[str, Any]:
        seen.append(body)
        made = reply(body)
        meta = made["choices"][0]["meta_info"]
        if "cache_salt" in body:
            meta["cached_tokens"] = cached
            meta["intentkv"]["events"] = events
        return made

    return seen, answer


def test_as_published_every_turn_is_salted_and_computed_anew(tmp_path: Path) -> None:
    """No two turns share a salt, the full cache goes without, and what is computed is the sum of the prompts."""
    plan = by_layout(["random"], [50, 12], ["as-published"])["as-published"]
    assert [configuration.key for configuration in plan] == [
        "full",
        "random@50%/as-published",
        "random@12%/as-published",
    ]
    assert layout_flags("as-published") == layout_flags("reclaim")
    assert layout_flags("mask") == ["--intentkv-layout", "mask"]
    seen, answer = published()
    journal = Journal(tmp_path / "j", {})
    with fake_server(answer) as url:
        play_all(url, plan, SESSIONS, journal)
    turns = sum(len(session.turns) for session in SESSIONS)
    assert not any("cache_salt" in body for body in seen[:turns])
    assert len({body["cache_salt"] for body in seen[turns:]}) == 2 * turns
    figures = summaries(journal.plays)
    for key in ("random@50%/as-published", "random@12%/as-published"):
        prompts = [t["prompt_tokens"] for p in journal.plays if p["configuration"] == key for t in p["turns"]]
        assert figures[key]["prefix_hit"] == 0 and figures[key]["prefilled_tokens"] == sum(prompts)
    assert figures["full@100%"]["prefilled_tokens"] < sum(prompts)


@pytest.mark.parametrize(("events", "cached"), [(2, 0), (1, 3)])
def test_a_server_that_reuses_or_drops_twice_is_not_as_published(tmp_path: Path, events: int, cached: int) -> None:
    plan = by_layout(["random"], [50], ["as-published"])["as-published"]
    _, answer = published(events, cached)
    with (
        fake_server(answer) as url,
        pytest.raises(ValueError, match="--chunked-prefill-size above the longest"),
    ):
        play_all(url, plan, SESSIONS[:1], Journal(tmp_path / "j", {}))


def test_a_running_server_has_one_layout(tmp_path: Path) -> None:
    run = subprocess.run(
        command("http://127.0.0.1:9", "--layouts", "reclaim", "mask"), check=False, cwd=tmp_path, capture_output=True
    )
    assert run.returncode == 2 and b"a server has one layout" in run.stderr


def test_what_a_server_refuses_is_wrong_and_ends_the_session_there(tmp_path: Path) -> None:
    count = [0]

    def answer(body: dict[str, Any]) -> dict[str, Any] | int:
        count[0] += 1
        return 400 if count[0] == 4 else reply(body)

    journal = Journal(tmp_path / "j", {})
    with fake_server(answer) as url:
        play_all(url, [Configuration(None, 100, "reclaim")], SESSIONS[:1], journal)
    turns = journal.plays[0]["turns"]
    assert [turn["completed"] for turn in turns] == [True] * 3 + [False] * (len(SESSIONS[0].turns) - 3)
    assert [turn["right"] for turn in turns] == [True] * 3 + [False] * (len(SESSIONS[0].turns) - 3)
    assert "400" in turns[3]["error"] and count[0] == 4


def test_a_server_that_serves_without_intentkv_is_not_taken_for_a_scorer(tmp_path: Path) -> None:
    def answer(body: dict[str, Any]) -> dict[str, Any]:
        return reply({**body, "custom_params": {}})

    journal = Journal(tmp_path / "j", {})
    plan = by_layout(["random"], [50], ["reclaim"])["reclaim"]
    with fake_server(answer) as url, pytest.raises(ValueError, match="serves without intentkv"):
        play_all(url, plan, SESSIONS[:1], journal)
    assert [play["configuration"] for play in journal.plays] == ["full"]


def test_budgets_wait_for_the_full_cache(tmp_path: Path) -> None:
    with fake_server() as url, pytest.raises(ValueError, match="order-desk-5 has no finished turn with the full cache"):
        play_all(url, [Configuration("random", 50, "reclaim")], SESSIONS[:1], Journal(tmp_path / "j", {}))
