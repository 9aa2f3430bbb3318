"""Confidence on its way from the logits to the session's budget, through SGLang's own classes."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from sglang.srt.layers.logits_processor import LogitsProcessorOutput
from sglang.srt.managers.scheduler_components.batch_result_processor import SchedulerBatchResultProcessor
from sglang.srt.managers.utils import GenerationBatchResult

from intentkv.config import Budget
from intentkv.engine.confidence_observer import ConfidenceObserver
from intentkv.keep.auto_budget import AutoBudgets
from intentkv.observe.confidence import WINDOW, token_confidence
from tests.host.actions import make_request, make_state
from tests.host.pools import publish_settings

publish_settings()
AUTO = Budget("auto", 512)


class Server:
    """One observer and the path of a step's logits."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *budgets: Budget | None) -> None:
        self.seen: list[tuple[str, float]] = []
        self.budgets = AutoBudgets(512, 30000, 1.75, 8)
        monkeypatch.setattr(self.budgets, "observe", lambda session, value: self.seen.append((session, value)))
        self.reqs = [
            make_request(f"r{i}", np.arange(3), None if budget is None else make_state(f"s{i}", 3, "streaming", budget))
            for i, budget in enumerate(budgets)
        ]
        self.states = {req.rid: req.intentkv for req in self.reqs if req.intentkv is not None}
        self.observer = ConfidenceObserver(self.budgets, self.states)
        self.observer.waiting = sum(budget is not None and budget.kind == "auto" for budget in budgets)
        self.batch = SimpleNamespace(reqs=self.reqs)

    def step(self, logits: torch.Tensor, commit: list[bool] | None = None) -> bool:
        """One step from logits to committed tokens; returns whether the observer looked at it."""
        self.observer.expect(SimpleNamespace(rids=[req.rid for req in self.reqs]))
        if not self.observer.is_active(SimpleNamespace()):
            return False
        state = self.observer.before_grammar(logits, SimpleNamespace())
        output = LogitsProcessorOutput(next_token_logits=logits)
        output.auxiliary_device_output = self.observer.after_sample(state, torch.zeros(len(logits)))
        logits.fill_(float("nan"))  # the sampler works in place
        result = GenerationBatchResult(logits_output=output)
        result.copy_auxiliary_output_to_cpu()
        starts = SchedulerBatchResultProcessor.snapshot_auxiliary_output_starts(self.batch, result)
        for req, wanted in zip(self.reqs, commit or [True] * len(self.reqs), strict=True):
            if wanted:
                req.output_ids.append(1)
        SchedulerBatchResultProcessor.consume_auxiliary_output(self.batch, result.auxiliary_host_output, starts)
        return True


def test_the_rows_of_auto_budgets_arrive_under_their_session(monkeypatch: pytest.MonkeyPatch) -> None:
    server = Server(monkeypatch, AUTO, Budget("fixed", 9), None, AUTO)
    logits = torch.randn(4, 300, generator=torch.Generator().manual_seed(0))
    expected = token_confidence(logits.clone()).tolist()
    assert server.step(logits)
    assert server.seen == [("s0", expected[0]), ("s3", expected[3])]


def test_what_is_not_committed_is_not_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    server = Server(monkeypatch, AUTO, AUTO)
    assert server.step(torch.randn(2, 50), commit=[False, True])
    assert [session for session, _ in server.seen] == ["s1"]


@pytest.mark.parametrize("budgets", [(None,), (Budget("fixed", 9), None), (Budget("share", 9.0),)])
def test_without_auto_nobody_looks_at_the_logits(budgets: tuple, monkeypatch: pytest.MonkeyPatch) -> None:
    server = Server(monkeypatch, *budgets)
    assert not server.step(torch.randn(len(budgets), 50))
    server.observer.waiting = 1  # others of this server have auto, this batch has none
    assert not server.step(torch.randn(len(budgets), 50))


def test_a_falling_confidence_raises_the_budget_of_the_session() -> None:
    budgets = AutoBudgets(512, 30000, 1.75, 8)
    state = make_state("a", 3, "streaming", AUTO)
    req = make_request("r", np.arange(3), state)
    observer = ConfidenceObserver(budgets, {"r": state})
    observer.waiting = 1
    for step in range(8 * WINDOW):
        observer.expect(SimpleNamespace(rids=["r"]))
        logits = torch.zeros(1, 50)
        logits[0, 0] = 30.0 - step / 20  # ever less peaked
        host = observer.after_sample(observer.before_grammar(logits, None), torch.zeros(1)).copy_to_host(lambda t: t)
        host.consume(SimpleNamespace(reqs=[req]), [object()])
    assert budgets.decide("a").tokens(0) == 896 and budgets.slope("a") < 0
