"""The agents of `make soak` against a server that answers at once, and one that refuses."""

from __future__ import annotations

import time

import pytest

from scripts import soak
from tests.evals.fake_server import fake_server, reply

AGENTS = [{"intentkv_scorer": "intent", "intentkv_budget": 256}, {"intentkv_enabled": False}]


def test_soak_agents_play_until_they_are_stopped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(soak, "AGENTS", AGENTS)
    seen = set()

    def answer(body: dict) -> dict:
        seen.add((body["session_id"], body["custom_params"].get("intentkv_scorer")))
        return reply(body)

    with fake_server(answer) as url:
        load = soak.Load(url)
        while len(load.turns) < 40 and load.seconds() < 30:
            time.sleep(0.05)
        load.stop()
        end, played = load.seconds(), len(load.turns)
    assert load.errors == [] and played >= 40
    assert all(0 < turn <= end for turn in load.turns)
    assert {scorer for _, scorer in seen} == {"intent", None}
    assert len(seen) > 2, "an agent begins a new session after its last"


def test_soak_agent_that_gets_no_answer_stops(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(soak, "AGENTS", AGENTS)
    with fake_server(lambda body: 503 if "intentkv_scorer" in body["custom_params"] else reply(body)) as url:
        load = soak.Load(url)
        while not (load.errors and load.turns) and load.seconds() < 30:
            time.sleep(0.05)
        load.stop()
    (error,) = load.errors
    assert "503" in error and load.turns
