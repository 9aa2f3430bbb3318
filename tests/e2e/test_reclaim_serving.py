"""Reclaim on a real server under pressure: the same answers as masking in a pool where nothing is ever short.

Eight agents of eight turns over one system prompt, with forks and clients that hang up, in a pool of a quarter of their
full KV, while SGLang checks its pool busy and idle and retracts requests for the sake of it. The model is tiny, random and
computed in float32: it says something else as soon as it reads something else, and not because a sum was taken in another
order.
"""

from __future__ import annotations

import contextlib
import json
import random
import time
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from intentkv.evals.load import read_metrics
from intentkv.evals.model import tiny_checkpoint
from intentkv.evals.server import Server, running_server

AGENTS, TURNS = 8, 8
Talk = tuple[list[str], list[dict[str, Any]]]  # answers, and reports of the agent's own turns
SYSTEM = "You keep the log of the harbour. Answer in few words and never guess what the log does not say. " * 3
WORDS = ("crane", "barge", "rope", "tide", "anchor", "buoy", "pilot", "cargo", "lock", "berth", "signal", "chain")
FLAGS = [
    "--dtype",
    "float32",
    "--enable-metrics",
    "--chunked-prefill-size",
    "128",
    "--max-running-requests",
    "8",
    "--enable-intentkv",
]
FLAGS += ["--intentkv-budget", "64", "--intentkv-trigger", "32", "--intentkv-recent", "16"]


def turn_text(agent: int, turn: int) -> str:
    draw = random.Random(f"{agent} {turn}")
    return f"Entry {turn} of watch {agent}: " + " ".join(draw.choice(WORDS) for _ in range(60)) + ". What is next?"


def ask(server: Server, session: str, messages: list[dict[str, str]], tokens: int = 160) -> tuple[str, dict[str, Any]]:
    body = {"model": "m", "messages": messages, "temperature": 0, "max_tokens": tokens, "session_id": session}
    data = json.dumps({**body, "ignore_eos": True, "return_meta_info": True}).encode()
    request = urllib.request.Request(server.url + "/v1/chat/completions", data, {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=300) as answer:
        choice = json.load(answer)["choices"][0]
    return choice["message"]["content"], choice["meta_info"]["intentkv"]


def hang_up(server: Server, messages: list[dict[str, str]]) -> None:
    """A visitor who streams an answer and disconnects after the first bytes."""
    body = {"model": "m", "messages": messages, "temperature": 0, "max_tokens": 200, "stream": True}
    data = json.dumps({**body, "session_id": "visitor"}).encode()
    request = urllib.request.Request(server.url + "/v1/chat/completions", data, {"Content-Type": "application/json"})
    with contextlib.closing(urllib.request.urlopen(request, timeout=300)) as answer:
        answer.read(16)


def play(server: Server, agent: int) -> Talk:
    """One agent's answers and reports, with a fork at its fourth turn and a visitor at its sixth."""
    messages = [{"role": "system", "content": SYSTEM}]
    answers, reports = [], []
    for turn in range(TURNS):
        messages.append({"role": "user", "content": turn_text(agent, turn)})
        answer, report = ask(server, f"agent-{agent}", messages)
        answers.append(answer)
        reports.append(report)
        messages.append({"role": "assistant", "content": answer})
        if turn == 3:
            forked = [*messages, {"role": "user", "content": f"Sub-task of watch {agent}: count the barges."}]
            answers.append(ask(server, f"fork-{agent}", forked, tokens=12)[0])
        if turn == 5:
            hang_up(server, [*messages[:1], {"role": "user", "content": turn_text(99, agent)}])
    return answers, reports


def run(model: Path, flags: list[str], log: Path) -> tuple[list[Talk], dict[str, float]]:
    """All agents at once on one server, which must be sound at the end."""
    with running_server(model, [*FLAGS, *flags], log) as server:
        with ThreadPoolExecutor(AGENTS) as threads:
            talks = list(threads.map(lambda agent: play(server, agent), range(AGENTS)))
        assert ask(server, "afterwards", [{"role": "user", "content": "Still there?"}])[0]
        time.sleep(2)  # idle: SGLang's own check and the ledger's audit would have ended the server
        assert ask(server, "afterwards", [{"role": "user", "content": "And now?"}])[0]
        counters = read_metrics(server.url)
    assert "leak" not in log.read_text() and "ledger is wrong" not in log.read_text()
    return talks, counters


@pytest.mark.parametrize("page_size", [1, 16])
def test_reclaim_in_a_quarter_pool_answers_as_mask_in_an_ample_one(
    tmp_path: Path, servers: Any, monkeypatch: pytest.MonkeyPatch, page_size: int
) -> None:
    """Every answer is the same, token for token, and so is what is left of every session; memory really comes back."""
    servers.stop()
    monkeypatch.setenv("SGLANG_ENABLE_STRICT_MEM_CHECK_DURING_BUSY", "1")
    model = tiny_checkpoint(tmp_path / "tiny", kind="qwen3")
    pages = ["--page-size", str(page_size)]
    mask = [*pages, "--intentkv-layout", "mask", "--max-total-tokens", "60000"]
    expected, _ = run(model, mask, tmp_path / "mask.log")
    full = sum(reports[-1]["logical_tokens"] for _, reports in expected)
    monkeypatch.setenv("SGLANG_TEST_RETRACT", "1")
    talks, counters = run(model, [*pages, "--max-total-tokens", str(full // 4)], tmp_path / "reclaim.log")
    retractions = (tmp_path / "reclaim.log").read_text().count("Testing retraction.")
    lost = counters["intentkv_namespaces_evicted_total"]
    freed, masked = (
        sum(report["freed_slots"] for _, reports in told for report in reports) for told in (talks, expected)
    )
    print(
        f"full KV {full} tokens, pool {full // 4}; {retractions} retractions, {freed} slots freed, {lost:.0f} evicted"
    )
    assert lost == 0, "a session that lost what it had kept decides anew, and may differ"
    assert retractions > 100 and freed > full // 2 and masked == 0
    assert len({answer for answers, _ in expected for answer in answers}) == AGENTS * (TURNS + 1)
    for agent, ((answers, reports), (others, theirs)) in enumerate(zip(talks, expected, strict=True)):
        for turn, (report, other) in enumerate(zip(reports, theirs, strict=True)):
            for key in ("logical_tokens", "live_tokens", "dropped_tokens", "events"):
                assert report[key] == other[key], f"agent {agent}, turn {turn}: {key}"
        assert answers == others, f"agent {agent}"
