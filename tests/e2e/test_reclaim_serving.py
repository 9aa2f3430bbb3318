"""Reclaim on a real server under pressure.

Eight agents of eight turns over one system prompt, with forks and clients that hang up, in a pool of about a quarter of
their full KV, while SGLang checks its pool busy and idle and retracts requests for the sake of it.
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

from intentkv.evals.model import tiny_checkpoint
from intentkv.evals.server import Server, running_server

AGENTS, TURNS = 8, 8
SYSTEM = "You keep the log of the harbour. Answer in few words and never guess what the log does not say. " * 3
WORDS = ("crane", "barge", "rope", "tide", "anchor", "buoy", "pilot", "cargo", "lock", "berth", "signal", "chain")
FLAGS = ["--chunked-prefill-size", "128", "--max-running-requests", "8", "--enable-intentkv"]
FLAGS += ["--intentkv-budget", "64", "--intentkv-trigger", "32", "--intentkv-recent", "16"]


def turn_text(agent: int, turn: int) -> str:
    draw = random.Random(f"{agent} {turn}")
    return f"Entry {turn} of watch {agent}: " + " ".join(draw.choice(WORDS) for _ in range(120)) + ". What is next?"


def ask(server: Server, session: str, messages: list[dict[str, str]], tokens: int = 12) -> tuple[str, dict[str, Any]]:
    body = {"model": "m", "messages": messages, "temperature": 0, "max_tokens": tokens, "session_id": session}
    data = json.dumps({**body, "return_meta_info": True}).encode()
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


def play(server: Server, agent: int) -> tuple[list[str], list[dict[str, Any]]]:
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
            answers.append(ask(server, f"fork-{agent}", forked)[0])
        if turn == 5:
            hang_up(server, [*messages[:1], {"role": "user", "content": turn_text(99, agent)}])
    return answers, reports


def test_reclaim_in_a_quarter_pool_loses_nothing(tmp_path: Path, servers: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every request of every agent and fork is answered, memory really comes back, and the server is sound at the end."""
    servers.stop()
    monkeypatch.setenv("SGLANG_ENABLE_STRICT_MEM_CHECK_DURING_BUSY", "1")
    monkeypatch.setenv("SGLANG_TEST_RETRACT", "1")
    model = tiny_checkpoint(tmp_path / "tiny", kind="qwen3")
    pool = 2900
    with running_server(model, [*FLAGS, "--max-total-tokens", str(pool)], tmp_path / "server.log") as server:
        with ThreadPoolExecutor(AGENTS) as threads:
            talks = list(threads.map(lambda agent: play(server, agent), range(AGENTS)))
        assert ask(server, "afterwards", [{"role": "user", "content": "Still there?"}])[0]
        time.sleep(2)  # idle: SGLang's own check and the ledger's audit would have ended the server
        assert ask(server, "afterwards", [{"role": "user", "content": "And now?"}])[0]
    log = (tmp_path / "server.log").read_text()
    full = sum(reports[-1]["logical_tokens"] for _, reports in talks)
    freed = sum(report["freed_slots"] for _, reports in talks for report in reports)
    retractions = log.count("Testing retraction.")
    print(f"full KV {full} tokens, pool {pool}; {retractions} retractions, {freed} slots freed")
    assert [len(answers) for answers, _ in talks] == [TURNS + 1] * AGENTS
    assert full > 3.5 * pool and freed > full // 2 and retractions > 10
    assert "leak" not in log and "ledger is wrong" not in log
