"""Two ranks on a real server, over gloo: sharing one model (tp), and each with a model of its own (dp).

The model is tiny, random and computed in float32, with 4 KV heads. Eleven agents play the same sessions on both servers, most of
them with a scorer of their own, all at once. A replica of the dp server is one rank with all the heads, so what it says is what the
two ranks of the tp server must say together. They need not to the bit, since a sum over heads is taken in another order; but
a random model says something else as soon as it reads something else, and its logits are much further apart than float32's
last bits.
"""

from __future__ import annotations

import json
import random
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from intentkv.engine.doctor_server import examine_server
from intentkv.evals.load import read_metrics
from intentkv.evals.model import tiny_checkpoint
from intentkv.evals.server import Server

TURNS, ANSWER = 3, 32
RULES = "You keep the log of the harbour. Answer in few words and never guess what the log does not say. " * 11
WORDS = ("crane", "barge", "rope", "tide", "anchor", "buoy", "pilot", "cargo", "lock", "berth", "signal", "chain")
SCORERS = (
    "intent", "intent-rule", "snapkv", "h2o", "keydiff", "expected-attention", "r-kv", "actkv", "random-sentence",
)  # fmt: skip
FLAGS = (
    "--dtype", "float32", "--chunked-prefill-size", "128", "--enable-metrics", "--enable-intentkv", "--intentkv-budget", "96",
    "--intentkv-trigger", "32", "--intentkv-recent", "16", "--intentkv-action-template", "answer",
    "--intentkv-budget-init", "48", "--intentkv-budget-max", "200",
)  # fmt: skip


@dataclass(frozen=True)
class Agent:
    """Who plays: `name` is its session's id, and None lets the text tell; `params` are its custom parameters."""

    name: str | None
    params: dict[str, str]


AGENTS = [Agent(f"agent {scorer}", {"intentkv_scorer": scorer}) for scorer in SCORERS]
AGENTS += [Agent("agent auto", {"intentkv_budget": "auto"}), Agent(None, {})]


@dataclass(frozen=True)
class Played:
    """What a server said: by agent, answers and `meta_info` of each turn; of all, its audit and its counters at the end."""

    talks: list[list[tuple[str, dict[str, Any]]]]
    schedulers: list[dict[str, Any]]
    faults: list[str]
    counters: dict[str, float]

    def reports(self, agent: int) -> list[dict[str, Any]]:
        return [meta["intentkv"] for _, meta in self.talks[agent]]


def ask(server: Server, agent: Agent, messages: list[dict[str, str]]) -> tuple[str, dict[str, Any]]:
    body: dict[str, Any] = {
        "model": "m",
        "messages": messages,
        "temperature": 0,
        "max_tokens": ANSWER,
        "ignore_eos": True,
    }
    body |= {"return_meta_info": True, "custom_params": agent.params}
    body |= {"session_id": agent.name} if agent.name else {}
    request = urllib.request.Request(
        server.url + "/v1/chat/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=300) as answer:
        choice = json.load(answer)["choices"][0]
    return choice["message"]["content"], choice["meta_info"]


def talk(server: Server, number: int) -> list[tuple[str, dict[str, Any]]]:
    # Nothing else is shared than how a prompt begins: what another agent has computed first is observed for that one's scorer.
    messages, said = [{"role": "system", "content": f"Watch {number}. {RULES}"}], []
    for turn in range(TURNS):
        draw = random.Random(f"{number} {turn}")
        entry = " ".join(draw.choice(WORDS) + draw.choice(("", ".")) for _ in range(60))
        messages.append({"role": "user", "content": f"Entry {turn} of watch {number}: {entry}. What is next?"})
        said.append(ask(server, AGENTS[number], messages))
        messages.append({"role": "assistant", "content": said[-1][0]})
    return said


def play(server: Server) -> Played:
    with ThreadPoolExecutor(len(AGENTS)) as threads:
        talks = list(threads.map(lambda number: talk(server, number), range(len(AGENTS))))
    return Played(talks, *examine_server(server.url), read_metrics(server.url))


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_checkpoint(tmp_path_factory.mktemp("tp") / "tiny", kind="qwen3", heads=8, kv_heads=4)


@pytest.fixture(scope="module")
def dp(servers: Any, model: Path) -> Iterator[Played]:
    yield play(servers.get(*FLAGS, "--dp-size", "2", model=model))


@pytest.fixture(scope="module")
def tp(servers: Any, model: Path, dp: Played) -> Iterator[Played]:
    """Every decision is compared over the ranks while it is made: the server would not outlive a difference."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("INTENTKV_CHECK_RANKS", "1")
        yield play(servers.get(*FLAGS, "--tp-size", "2", model=model))
    servers.stop()  # its environment is gone, so nobody else may have it


@pytest.mark.parametrize("number", range(len(AGENTS)), ids=[agent.name or "unnamed" for agent in AGENTS])
def test_tp_2_answers_and_drops_as_one_rank(tp: Played, dp: Played, number: int) -> None:
    assert [answer for answer, _ in tp.talks[number]] == [answer for answer, _ in dp.talks[number]]
    for ours, other in zip(tp.reports(number), dp.reports(number), strict=True):
        for key in ("session", "scorer", "events", "logical_tokens", "live_tokens", "dropped_tokens", "freed_slots"):
            assert ours[key] == other[key], key
    last = tp.reports(number)[-1]
    assert last["dropped_tokens"] > 100 and last["reused_prefix_tokens"] > 100


def test_tp_ranks_are_all_audited(tp: Played) -> None:
    """One scheduler answers for both ranks: no slot without an owner on either, and the same decisions."""
    assert tp.faults == []
    (scheduler,) = tp.schedulers
    assert scheduler["ranks"] == 2 and scheduler["running"] == 0 and scheduler["sessions"] >= len(AGENTS)


@pytest.mark.parametrize("kind", ["tp", "dp"])
def test_tp_and_dp_counters_count_every_event_once(tp: Played, dp: Played, kind: str) -> None:
    played = {"tp": tp, "dp": dp}[kind]
    reports = [report for number in range(len(AGENTS)) for report in played.reports(number)]
    counters = played.counters
    assert counters["intentkv_freed_slots_total"] == sum(report["freed_slots"] for report in reports) > 0
    assert counters["intentkv_reused_prefix_tokens_total"] == sum(r["reused_prefix_tokens"] for r in reports) > 0
    # Health checks have been sessions, too.
    assert counters["intentkv_sessions"] == sum(s["sessions"] for s in played.schedulers) >= len(AGENTS)


def test_dp_a_session_stays_on_its_replica(dp: Played) -> None:
    """Its turns land where its record lives, named or not, and find there what the turn before has left."""
    replicas = [{meta["dp_rank"] for _, meta in talk} for talk in dp.talks]
    assert all(len(ranks) == 1 for ranks in replicas) and {0, 1} == set.union(*replicas)
    assert dp.faults == [] and len(dp.schedulers) == 2
    assert all(scheduler["sessions"] >= len(AGENTS) // 2 for scheduler in dp.schedulers)
    for number in range(len(AGENTS)):
        before, last = dp.reports(number)[-2:]
        # All but the answer: its random tokens are others when its text comes back.
        assert before["live_tokens"] - ANSWER - 4 <= last["reused_prefix_tokens"] <= before["live_tokens"]
