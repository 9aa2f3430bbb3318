"""Events at the end of a round, on the real cache and allocator: what is dropped, when, and what the next turn knows."""

from __future__ import annotations

import itertools
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from intentkv.apply.rows import live_positions
from intentkv.config import Settings, settings_from_kwargs
from intentkv.engine import requests, runtime
from intentkv.engine.answers import report
from intentkv.engine.runtime import NEVER, Runtime
from intentkv.engine.state import Turn
from tests.host.actions import Tokenizer, make_state, scheduler_of
from tests.host.checks import check_world
from tests.host.pools import publish_settings
from tests.host.world import World

publish_settings()
ANSWER = 'I see . <tool_call>{"name": "f", "a": 1}</tool_call> and so on'


class ActionWorld(World):
    """A world whose runtime is ours: answers are scripted, and the attention of an action goes where a test says."""

    def __init__(self, settings: Settings, monkeypatch: pytest.MonkeyPatch, **world: Any) -> None:
        super().__init__(**world)
        self.tokenizer = Tokenizer()
        self.allocator.get_kvcache = lambda: SimpleNamespace(get_key_buffer=None)  # ActKV reads no keys
        self.runtime = Runtime(settings, scheduler_of(self.cache, self.tokenizer))
        self.move_contents()
        monkeypatch.setattr(runtime, "_runtime", self.runtime)
        # Only rounds are looked at here, not prompts.
        self.cache.admit = self.cache.stop = self.cache.usable = None
        self.script: dict[str, list[int]] = {}
        self.attended: dict[str, np.ndarray] = {}

    def session_request(
        self, tokens: list[int], session: str, answer: str, attended: np.ndarray, query: tuple[int, int]
    ) -> Any:
        """A turn that will say `answer`; its actions attend to the positions `attended` alone, evenly."""
        script = self.tokenizer.encode(answer)
        req = self.request(tokens, session, new=len(script))
        state = make_state(session, len(tokens), "actkv", self.runtime.settings.budget, query)
        state.turn, state.look = Turn(torch.zeros(1), torch.zeros(1), None), NEVER
        req.intentkv = state
        self.runtime.states[req.rid] = state
        self.runtime.open_session(state, np.array(tokens))
        self.script[req.rid], self.attended[req.rid] = script, attended
        return req

    def next_token(self, req: Any) -> int:
        return self.script[req.rid][len(req.output_ids)]

    def turn(self, req: Any) -> list[int]:
        """Serve a request as the scheduler does; returns the live tokens after each decode step."""
        assert self.admit(req)
        live = []
        while req in self.running:
            self.step(req)
            if not req.finished():
                check_world(self)
            live.append(len(req.origin_input_ids) + len(req.output_ids) - len(req.intentkv.holes))
        return live

    def step(self, req: Any) -> None:
        """One decode step: its forward, what is observed and decided behind it, and its result."""
        self._recover(req)
        length, row = len(req.origin_input_ids) + len(req.output_ids), req.kv.req_pool_idx
        self.decode([req])
        if not req.finished() and length >= req.intentkv.look:
            self.runtime.look(req.intentkv, row, length)
        requests.apply_while_decoding(None, None, SimpleNamespace(reqs=[req]), None)

    def _recover(self, req: Any) -> None:
        """What the forward of the newest token would have recovered."""
        if req.rid not in self.runtime.actions._inside:
            return
        length = len(req.origin_input_ids) + len(req.output_ids)
        live = live_positions(0, length, req.intentkv.holes)
        attention = np.isin(live, self.attended[req.rid]).astype(np.float32)
        req.intentkv.action.recovered(
            length - 1, torch.from_numpy(attention / max(1, attention.sum())), req.intentkv.holes
        )


def make_world(monkeypatch: pytest.MonkeyPatch, page_size: int = 1, **settings: Any) -> ActionWorld:
    values = {"scorer": "actkv", "budget": 16 * page_size, "trigger": page_size, "recent": 2, **settings}
    return ActionWorld(settings_from_kwargs(**values), monkeypatch, page_size=page_size, size=256 * page_size)


@pytest.mark.parametrize("page_size", [1, 16])
def test_a_round_drops_what_no_action_read(page_size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    world = make_world(monkeypatch, page_size)
    prompt = np.random.default_rng(0).integers(100, 200, 64 * page_size).tolist()
    needed = np.arange(8 * page_size, 16 * page_size)
    # The whole prompt is the newest message: no action, however it ends, can make it go.
    req = world.session_request(prompt, "a", ANSWER, needed, query=(0, 64 * page_size))
    world.turn(req)
    assert not (req.intentkv.holes < 64 * page_size).any() and req.intentkv.action.regions == 1

    text = prompt + list(req.output_ids) + [5] * page_size
    second = world.session_request(text, "a", ANSWER, needed, query=(len(text) - page_size, len(text)))
    world.turn(second)
    holes = second.intentkv.holes
    assert second.intentkv.events >= 1 and len(holes) >= 32 * page_size
    hits = needed[: int(0.9 * len(needed))]  # the nucleus; the tail of an even attention scores as if it had none
    assert not np.isin(hits, holes).any(), "what the actions read was dropped"
    assert second.intentkv.freed > 0
    assert world.cache.audit() == []


def test_the_event_comes_with_the_end_of_the_action_and_not_before(monkeypatch: pytest.MonkeyPatch) -> None:
    """A long generation shrinks while it runs, once the call is complete."""
    world = make_world(monkeypatch)
    prompt = list(range(100, 200))
    answer = "word " * 40 + '<tool_call>{"name": "f"}</tool_call>' + " word" * 40
    req = world.session_request(prompt, "a", answer, np.arange(8), query=(96, 100))
    live = world.turn(req)
    drops = [i for i, (before, after) in enumerate(itertools.pairwise(live)) if after < before]
    ends = world.script[req.rid].index(world.tokenizer.encode("</tool_call>")[0])
    assert len(drops) == 2  # when the call is complete, and when the answer is
    assert drops[0] + 1 == ends  # the first token comes from the prefill; the event from the step behind the call
    assert len(live) - 2 == drops[1]
    assert not np.isin(np.arange(8), req.intentkv.holes).any()


def test_the_next_turn_goes_on_with_the_keep_scores(monkeypatch: pytest.MonkeyPatch) -> None:
    world = make_world(monkeypatch, budget=1000)
    prompt = list(range(100, 160))
    first = world.session_request(prompt, "a", ANSWER, np.array([7, 9]), query=(0, 4))
    world.turn(first)
    text = prompt + list(first.output_ids) + [1, 2, 3]
    second = world.session_request(text, "a", ANSWER, np.array([9]), query=(0, 4))
    assert second.intentkv.action.keep.at(np.array([7, 8, 9])).tolist() == [0.5, 0.0, 0.5]
    world.turn(second)
    assert second.intentkv.action.keep.at(np.array([7, 8, 9])).tolist() == [0.25, 0.0, 1.25]
    counts = second.intentkv.action.keep.access.counts()
    assert counts == {"cold_start": 0, "intermittent": 0, "continuous": 2}
    stranger = world.session_request(text, "b", ANSWER, np.array([9]), query=(0, 4))
    assert not stranger.intentkv.action.keep.at(np.arange(60)).any()
    world.cache.reset()
    assert (
        not world.session_request(text, "a", ANSWER, np.array([9]), (0, 4)).intentkv.action.keep.at(np.arange(60)).any()
    )


def test_an_aborted_turn_leaves_the_last_finished_one(monkeypatch: pytest.MonkeyPatch) -> None:
    world = make_world(monkeypatch, budget=1000)
    prompt = list(range(100, 160))
    first = world.session_request(prompt, "a", ANSWER, np.array([7]), query=(0, 4))
    world.turn(first)
    text = prompt + list(first.output_ids) + [1, 2, 3]
    given_up = world.session_request(text, "a", ANSWER, np.array([9]), query=(0, 4))
    assert world.admit(given_up)
    for _ in range(10):
        world.step(given_up)
    assert given_up.rid in world.runtime.actions._inside
    world.abort(given_up)
    again = world.session_request(text, "a", ANSWER, np.array([9]), query=(0, 4))
    assert again.intentkv.action.keep.at(np.array([7, 9])).tolist() == [1.0, 0.0]


def test_a_retracted_turn_observes_its_region_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    world = make_world(monkeypatch, budget=1000)
    req = world.session_request(list(range(100, 160)), "a", ANSWER, np.array([7]), query=(0, 4))
    assert world.admit(req)
    for _ in range(8):
        world.step(req)
    assert req.intentkv.action.inside and req.intentkv.action._steps
    world.retract(req)
    requests.take_back_event(None, req)
    assert req.intentkv.action.inside and not req.intentkv.action._steps
    world.turn(req)
    assert req.intentkv.action.regions == 1
    assert req.intentkv.action.keep.at(np.array([7])).tolist() == [1.0]


def test_a_budget_of_auto_is_decided_before_the_event(monkeypatch: pytest.MonkeyPatch) -> None:
    world = make_world(monkeypatch, budget="auto", budget_init=16, budget_max=40, budget_growth=2)
    prompt = list(range(100, 200))
    req = world.session_request(prompt, "a", ANSWER, np.arange(4), query=(96, 100))
    assert req.intentkv.budget.tokens(0) == 16 and world.runtime.confidence.waiting == 1
    for value in np.linspace(20, 10, 600):
        world.runtime.budgets.observe("a", float(value))
    peak = world.runtime.peak(req, 100)
    world.turn(req)
    assert world.runtime.peak(req, 100) >= peak
    assert req.intentkv.budget.tokens(0) == 32 and str(req.intentkv.budget) == "auto"
    told = report(req, req.intentkv)
    assert told["budget"] == "auto" and told["budget_tokens"] == 32 and told["confidence_slope"] < 0
    assert told["action_regions"] == 1 and set(told["access"]) == {"cold_start", "intermittent", "continuous"}
    assert world.runtime.budgets.decide("b").tokens(0) == 16
