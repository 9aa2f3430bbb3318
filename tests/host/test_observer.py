"""Which query rows a prefill hands to which request, and that their mean is the mean over the whole span."""

from __future__ import annotations

import itertools
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from sglang.srt.model_executor.forward_batch_info import ForwardMode

from intentkv.config import Budget
from intentkv.engine.observer import ForwardPlan, computed, plan_forward
from intentkv.engine.state import RequestState, Turn
from intentkv.observe.query_mean import QueryMean
from intentkv.observe.session import SessionKey
from intentkv.observe.spans import Spans
from intentkv.score.base import Need


def state_with(query: tuple[int, int], prompt: int, *needs: Need) -> RequestState:
    """A request of `prompt` tokens whose scorer has these needs."""
    return RequestState(
        key=SessionKey("k", "explicit"),
        label="k",
        scorer="intent",
        budget=Budget("fixed", 8),
        spans=Spans(system_end=4, query=query, first_user_end=None),
        prompt=np.zeros(prompt, np.int64),
        needs=frozenset(needs),
    )


def batch(*requests: tuple[str, int, int], mode: ForwardMode = ForwardMode.EXTEND) -> SimpleNamespace:
    """Requests as (rid, prefix, extend) tokens; rows are numbered from 1."""
    rids, prefixes, lengths = zip(*requests, strict=True)
    return SimpleNamespace(
        forward_mode=mode,
        rids=list(rids),
        intentkv_rows=torch.arange(1, len(rids) + 1),
        seq_lens_cpu=torch.tensor(prefixes) + torch.tensor(lengths),
        extend_prefix_lens_cpu=list(prefixes),
        extend_seq_lens_cpu=list(lengths),
    )


def idle() -> dict[str, SimpleNamespace]:
    """What the hooks ask of a runtime beside its plan, with nothing to do."""
    nothing = lambda *args: None
    return {
        "actions": SimpleNamespace(begin=nothing, add=nothing, watching=False),
        "confidence": SimpleNamespace(expect=nothing),
    }


def planned(made: SimpleNamespace, states: dict[str, RequestState]) -> ForwardPlan | None:
    return plan_forward(made, states, computed(made))


def test_rows_are_counted_over_the_whole_batch() -> None:
    """Other people's requests take rows too; the span is cut to what this forward computes."""
    mine = state_with((130, 160), 160, "query")
    plan = planned(batch(("other", 0, 10), ("mine", 100, 60), ("late", 7, 3)), {"mine": mine})
    assert plan is not None
    (watched,) = plan.watched
    assert (watched.row, watched.end, watched.start, watched.stop) == (2, 160, 10 + 30, 10 + 60)
    assert watched.into is mine.query


@pytest.mark.parametrize(("prefix", "end", "rows"), [(100, 300, (136, 200)), (250, 280, (0, 30)), (100, 200, None)])
def test_the_tokens_before_an_event_stand_in_for_a_query_not_reached(
    prefix: int, end: int, rows: tuple[int, int] | None
) -> None:
    """Those of the 64 positions before the event that a chunk computes, wherever the chunk ends."""
    mine = state_with((500, 520), 520, "query")
    mine.look, mine.glimpse_from = 300, 236
    plan = planned(batch(("mine", prefix, end - prefix)), {"mine": mine})
    assert plan is not None
    (watched,) = plan.watched
    assert watched.into is mine.glimpse
    assert (watched.start, watched.stop) == rows if rows else watched.start >= watched.stop


def test_a_retracted_request_observes_nothing_twice() -> None:
    """It has seen its whole prompt before; what it computes again adds nothing to its mean."""
    mine = state_with((4, 9), 10, "query")
    mine.turn = Turn(torch.zeros(1), torch.zeros(1), None)
    plan = planned(batch(("mine", 0, 12)), {"mine": mine})
    assert plan is not None
    plan.feed(0, torch.ones(12, 1, 4))
    assert not mine.query


@pytest.mark.parametrize("mode", [ForwardMode.DECODE, ForwardMode.IDLE])
def test_only_prefills_are_watched(mode: ForwardMode) -> None:
    assert planned(batch(("mine", 9, 1), mode=mode), {"mine": state_with((0, 9), 10)}) is None


def test_nobody_of_ours() -> None:
    assert planned(batch(("other", 0, 10)), {}) is None


@pytest.mark.parametrize("cuts", [[], [7], [3, 4, 11], [1, 2, 3, 4, 5]])
def test_the_mean_does_not_depend_on_the_chunks(cuts: list[int]) -> None:
    """A span of 16 rows in any number of chunks, 3 layers: equal to the mean over all rows in float64."""
    rows = torch.randn(16, 4, 8)
    mine = state_with((0, 16), 16, "query")
    edges = [0, *cuts, 16]
    for start, stop in itertools.pairwise(edges):
        plan = planned(batch(("mine", start, stop - start)), {"mine": mine})
        assert plan is not None
        for layer in range(3):
            plan.feed(layer, rows[start:stop] * (layer + 1))
    expected = torch.stack([rows.double().mean(0) * (layer + 1) for layer in range(3)])
    np.testing.assert_allclose(mine.query.mean().double(), expected, rtol=0, atol=1e-6)


def test_uneven_layers_are_refused() -> None:
    mean = QueryMean()
    with pytest.raises(ValueError, match="no query was observed"):
        mean.mean()
    mean.add(0, torch.ones(2, 1, 4))
    mean.add(1, torch.ones(3, 1, 4))
    with pytest.raises(ValueError, match="layers saw different query rows"):
        mean.mean()
