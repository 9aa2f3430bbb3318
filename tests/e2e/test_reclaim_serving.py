"""Reclaim on a real server under pressure: the same tokens as masking in a pool where nothing is ever short.

Eight agents of eight turns over one system prompt, with forks and clients that hang up, in a pool of a quarter of their
full KV, while SGLang checks its pool busy and idle and retracts requests for the sake of it. The model is tiny, random and
float32, so that a difference in the order of a sum does not decide a token.
"""

from __future__ import annotations

import contextlib
import json
import random
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from intentkv.evals.load import read_metrics
from intentkv.evals.model import tiny_checkpoint
from intentkv.evals.server import Server, running_server

AGENTS, TURNS = 8, 8
SYSTEM = "You keep the log of the harbour. Answer in few words and never guess what the log does not say. " * 3
WORDS = ("crane", "barge", "rope", "tide", "anchor", "buoy", "pilot", "cargo", "lock", "berth", "signal", "chain")
FLAGS = ["--dtype", "float32", "--chunked-prefill-size", "128", "--max-running-requests", "8", "--enable-metrics"]
FLAGS += ["--enable-intentkv", "--intentkv-budget", "64", "--intentkv-trigger", "32", "--intentkv-recent", "16"]


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


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_checkpoint(tmp_path_factory.mktemp("model") / "tiny", kind="qwen3")


def run(
    model: Path, flags: list[str], log: Path
) -> tuple[list[tuple[list[str], list[dict[str, Any]]]], dict[str, float]]:
    with running_server(model, [*FLAGS, *flags], log) as server:
        with ThreadPoolExecutor(AGENTS) as pool:
            talks = list(pool.map(lambda agent: play(server, agent), range(AGENTS)))
        return talks, read_metrics(server.url)


def test_reclaim_in_a_quarter_pool_answers_as_mask_in_an_ample_one(
    model: Path, tmp_path: Path, servers: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    servers.stop()
    monkeypatch.setenv("SGLANG_ENABLE_STRICT_MEM_CHECK_DURING_BUSY", "1")
    reference, _ = run(model, ["--intentkv-layout", "mask", "--max-total-tokens", "40000"], tmp_path / "mask.log")
    full = sum(reports[-1]["logical_tokens"] for _, reports in reference)
    monkeypatch.setenv("SGLANG_TEST_RETRACT", "1")
    ours, counters = run(model, ["--max-total-tokens", str(full // 4)], tmp_path / "reclaim.log")
    log = (tmp_path / "reclaim.log").read_text()
    retractions = log.count("Testing retraction.")
    freed = sum(report["freed_slots"] for _, reports in ours for report in reports)
    print(f"full KV {full} tokens, pool {full // 4}; {retractions} retractions, {freed} slots freed, ", end="")
    print(f"{counters['intentkv_namespaces_evicted_total']:.0f} namespaces lost")
    assert retractions > 10 and freed > full // 2
    assert len({answer for answers, _ in reference for answer in answers}) > AGENTS * TURNS // 2
    assert [answers for answers, _ in ours] == [answers for answers, _ in reference]
