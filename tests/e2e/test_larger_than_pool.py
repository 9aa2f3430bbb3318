"""Prompts and sessions larger than the whole KV pool, on a real server."""

from __future__ import annotations

import json
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

from intentkv.evals.families import FAMILIES
from intentkv.evals.model import model_path, tiny_checkpoint
from intentkv.evals.server import Server, running_server
from intentkv.evals.sessions import is_right, make_session

FILLER = "The quarterly review of the north depot was uneventful and the minutes were filed by the clerk. "
FLAGS = [
    "--max-running-requests",
    "4",
    "--chunked-prefill-size",
    "256",
    "--enable-intentkv",
    "--intentkv-trigger",
    "64",
]


def chat(server: Server, messages: list[dict[str, str]], session: str, **params: Any) -> tuple[int, Any]:
    body = {"model": "m", "messages": messages, "temperature": 0, "max_tokens": 16, "session_id": session}
    data = json.dumps({**body, "return_meta_info": True, "custom_params": params}).encode()
    request = urllib.request.Request(server.url + "/v1/chat/completions", data, {"Content-Type": "application/json"})
    try:
        with urllib.request.urlopen(request, timeout=300) as answer:
            choice = json.load(answer)["choices"][0]
            return answer.status, (choice["message"]["content"], choice["meta_info"]["intentkv"])
    except urllib.error.HTTPError as error:
        return error.code, json.loads(error.read())["message"]


def test_twelve_thousand_tokens_in_a_pool_of_four_thousand(tmp_path: Path, servers: Any) -> None:
    """Turn by turn, and again in one prompt: never more live than forced + budget + one chunk."""
    servers.stop()
    model = tiny_checkpoint(tmp_path / "tiny", context=32768)
    flags = [*FLAGS, "--max-total-tokens", "4000", "--intentkv-budget", "1000"]
    with running_server(model, flags, tmp_path / "server.log") as server:
        messages: list[dict[str, str]] = []
        for turn in range(7):
            messages.append({"role": "user", "content": FILLER * (100 if turn < 6 else 1) + f"This was note {turn}."})
            status, answer = chat(server, messages, "walker")
            assert status == 200, answer
            messages.append({"role": "assistant", "content": "Noted."})
        _, report = answer
        assert report["logical_tokens"] > 12_000
        assert report["live_tokens"] <= 1000 + 63 + 150  # budget, what is too little for an event, the forced tokens
        status, answer = chat(server, messages, "at once")
        assert status == 200, answer
        assert answer[1]["logical_tokens"] > 12_000 and answer[1]["events"] > 20
        status, message = chat(server, messages, "greedy", intentkv_budget=3900)
        assert status == 400 and "must be in memory at once; the KV pool has 4000" in message
        assert chat(server, messages[-2:], "after")[0] == 200


def test_right_answers_about_what_is_kept(tmp_path: Path, servers: Any) -> None:
    """SmolLM2, eight records one after the other in a pool of a third of them: the newest message is always there."""
    servers.stop()
    flags = [*FLAGS, "--max-total-tokens", "1700", "--intentkv-budget", "400"]
    right = 0
    with running_server(model_path(), flags, tmp_path / "server.log") as server:
        messages: list[dict[str, str]] = []
        for seed in range(8):
            turn = make_session(FAMILIES["order-desk"], seed, filler=18).turns[0]
            record, question = turn.messages[2]["content"], turn.messages[3]["content"]
            messages.append({"role": "user", "content": f"{record}\n\n{question}"})
            status, answer = chat(server, messages, "records")
            assert status == 200, answer
            text, report = answer
            right += is_right(text, turn.expected)
            messages.append({"role": "assistant", "content": text})
        assert report["logical_tokens"] > 3 * 1700 - 700 and report["live_tokens"] < 1_400
        assert right >= 6
