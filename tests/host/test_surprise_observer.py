"""Whose prompt tokens are measured, and that nothing of a slot's earlier owner is left."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from intentkv.engine import observer, runtime
from intentkv.engine.surprise import SurpriseObserver, lm_head_problem
from intentkv.kernels.surprise import token_surprise
from tests.host.test_observer import batch, idle, state_with

E, V, S = 8, 40, 30


class Active:
    """What the hook asks of the runtime."""

    def __init__(self, states: dict) -> None:
        self.attention = None
        self.views = SimpleNamespace(running=None)
        vars(self).update(idle())
        self.surprise = SurpriseObserver(S, torch.device("cpu"))
        self.surprise.by_slot.fill_(99.0)  # left by earlier owners
        self.states = states
        self.running_plan = None

    def look(self, *args: object) -> None:
        pass


@pytest.fixture
def forward(monkeypatch: pytest.MonkeyPatch):
    """Run one prefill of `requests` (rid, prefix, extend) through both hooks; returns what it used."""

    def run(active: Active, *requests: tuple[str, int, int]) -> SimpleNamespace:
        torch.manual_seed(1)
        forward_batch = batch(*requests)
        total = sum(length for _, _, length in requests)
        forward_batch.out_cache_loc = (torch.randperm(S - 1)[:total] + 1).to(torch.int32)
        forward_batch.ids, forward_batch.hidden = torch.randint(V, (total,)), torch.randn(total, E)
        forward_batch.head = torch.randn(V, E)
        monkeypatch.setattr(runtime, "_runtime", active)

        def model(runner: object, same: SimpleNamespace) -> None:
            head = SimpleNamespace(weight=same.head)
            processor = SimpleNamespace(logit_scale=None)
            observer.observe_hidden_states(processor, same.ids, same.hidden, head, same)

        observer.observe_forward(model, None, forward_batch)
        return forward_batch

    return run


def test_each_token_gets_what_the_row_before_it_predicted(forward) -> None:
    mine, other = state_with((130, 160), 160), state_with((2, 4), 4)
    mine.needs = frozenset({"surprise"})
    active = Active({"mine": mine, "other": other})
    f = forward(active, ("other", 0, 4), ("stranger", 0, 3), ("mine", 148, 12))
    expected = token_surprise(f.hidden[7:18], f.ids[8:19], f.head)
    slots = f.out_cache_loc.long()
    assert torch.equal(active.surprise.by_slot[slots[8:19]], expected)
    assert active.surprise.by_slot[slots[:8]].tolist() == [0.0] * 8  # no asker, and the first token of a forward
    untouched = torch.ones(S, dtype=torch.bool)
    untouched[slots] = False
    assert (active.surprise.by_slot[untouched] == 99.0).all()


def test_generated_tokens_stay_unknown_after_a_retraction(forward) -> None:
    """The request computes its 160 prompt tokens' end and 5 tokens that it had generated."""
    mine = state_with((130, 160), 160)
    mine.needs = frozenset({"surprise"})
    active = Active({"mine": mine})
    f = forward(active, ("mine", 155, 10))
    values = active.surprise.by_slot[f.out_cache_loc.long()]
    assert (values[1:5] > 0).all() and values[0] == 0 and values[5:].tolist() == [0.0] * 5


def test_a_chunk_of_one_token_measures_nothing(forward) -> None:
    mine = state_with((130, 160), 160)
    mine.needs = frozenset({"surprise"})
    active = Active({"mine": mine})
    f = forward(active, ("mine", 159, 1))
    assert active.surprise.by_slot[f.out_cache_loc.long()].tolist() == [0.0]


@pytest.mark.parametrize(
    ("model", "found"),
    [
        (SimpleNamespace(), "none"),
        (SimpleNamespace(lm_head=SimpleNamespace(weight=torch.zeros(2, 2, dtype=torch.int8))), "torch.int8"),
    ],
)
def test_a_model_without_a_usable_head_is_named(model: SimpleNamespace, found: str) -> None:
    problem = lm_head_problem(model)
    assert problem is not None and found in problem and "--intentkv-scorer" in problem


def test_a_plain_head_is_fine() -> None:
    assert lm_head_problem(SimpleNamespace(lm_head=torch.nn.Linear(2, 2))) is None
