"""What only some scorers need: that it is what it says, over chunks, holes and decode steps, and that nobody else pays."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from sglang.srt.model_executor.forward_batch_info import ForwardMode
from sglang.srt.model_executor.model_runner import ModelRunnerOutput
from torch import Tensor

from intentkv.apply.live_view import LiveViews
from intentkv.engine import observer, runtime
from intentkv.engine.collected import AttentionTap, covariance_input, window_input
from intentkv.engine.cpu_attention import CpuAttentionBackend
from intentkv.engine.state import RequestState
from intentkv.kernels import chunks
from intentkv.kernels.reference import attention_shares_reference
from intentkv.observe.attention_mass import AttentionMass
from intentkv.observe.query_moments import QueryMoments
from intentkv.observe.query_window import WINDOW_ROWS
from intentkv.score.base import Need
from tests.host.test_observer import batch, idle, planned, state_with
from tests.kernels.host import DIM, H_Q, Host

LAYERS = 2


def state(*needs: Need, query: tuple[int, int] = (90, 100), prompt: int = 100) -> RequestState:
    """A request whose scorer has these needs."""
    return state_with(query, prompt, *needs)


def feed(states: dict[str, RequestState], rows: Tensor, *requests: tuple[str, int, int], decode: bool = False) -> None:
    """One forward over `rows` `[tokens, H_q, D]`; layer l sees them times l + 1."""
    plan = planned(batch(*requests, mode=ForwardMode.DECODE if decode else ForwardMode.EXTEND), states)
    assert plan is not None
    for layer in range(LAYERS):
        plan.feed(layer, rows * (layer + 1))


@pytest.mark.parametrize("mode", [ForwardMode.EXTEND, ForwardMode.DECODE])
def test_who_needs_nothing_is_fed_nothing(mode: ForwardMode) -> None:
    """Of two requests in a batch, only the one that asks is planned for."""
    plain, asks = state(), state("window")
    plan = planned(batch(("plain", 9, 1), ("asks", 20, 1), mode=mode), {"plain": plain, "asks": asks})
    assert plan is not None
    assert [(fed.sink, fed.start, fed.stop) for fed in plan.fed] == [(asks.window, 1, 2)]
    assert plain.window is None and plain.tap is None
    assert not isinstance(plain.query, QueryMoments)


@pytest.mark.parametrize("cuts", [[100], [31, 100], [3, 50, 99, 100], [10, 100, 101, 102], [100, *range(101, 141)]])
def test_the_window_is_the_newest_rows(cuts: list[int]) -> None:
    """100 tokens of prompt in chunks, then decode steps, beside another request in the batch."""
    rows = torch.randn(cuts[-1], 3, 8)
    mine = state("window")
    for start, end in itertools.pairwise([0, *cuts]):
        decode = start >= 100
        others = ("other", 7, 1 if decode else 5)
        mixed = torch.cat((torch.randn(others[2], 3, 8), rows[start:end]))
        feed({"mine": mine}, mixed, others, ("mine", start, end - start), decode=decode)
    assert mine.window is not None
    assert mine.window.end == cuts[-1]
    newest = rows[-WINDOW_ROWS:]
    assert torch.equal(mine.window.rows(), torch.stack([newest, newest * 2]))


def test_a_prefix_from_the_cache_leaves_a_shorter_window() -> None:
    rows = torch.randn(5, 3, 8)
    mine = state("window")
    feed({"mine": mine}, rows, ("mine", 95, 5))
    assert mine.window is not None
    assert torch.equal(mine.window.rows()[0], rows)


def test_rows_from_before_a_jump_are_forgotten() -> None:
    """A retracted request finds another prefix than it had computed: its window never has a gap."""
    mine = state("window")
    feed({"mine": mine}, torch.randn(10, 3, 8), ("mine", 0, 10))
    rows = torch.randn(6, 3, 8)
    feed({"mine": mine}, rows, ("mine", 4, 6))
    assert mine.window is not None
    assert torch.equal(mine.window.rows()[0], rows)


def test_the_window_is_a_copy() -> None:
    rows = torch.randn(3, 3, 8)
    mine = state("window")
    feed({"mine": mine}, rows, ("mine", 0, 3))
    expected = rows.clone()
    rows.zero_()
    assert mine.window is not None
    assert torch.equal(mine.window.rows()[0], expected)


def test_the_windows_input_has_what_lives() -> None:
    mine = state("window")
    mine.holes = np.array([2, 3, 96])
    feed({"mine": mine}, torch.randn(7, 3, 8), ("mine", 93, 7))
    row = torch.arange(200, dtype=torch.int32) + 1000
    window = window_input(mine, row, 100, 0.25)
    assert window is not None
    assert (window.start, window.scale, window.before) == (93, 0.25, 91)
    assert window.positions.tolist() == [p for p in range(100) if p not in (2, 3, 96)]
    assert torch.equal(window.slots, window.positions + 1000)
    assert window.visible.tolist() == [92, 93, 94, 94, 95, 96, 97]
    assert window_input(state(), row, 100, 0.25) is None


@pytest.mark.parametrize("cuts", [[], [7], [1, 2, 3], [3, 4, 11]])
def test_moments_do_not_depend_on_the_chunks(cuts: list[int]) -> None:
    """Mean and covariance of the query span, with a mean that is large against the spread."""
    rows = torch.randn(16, 3, 8) + 100 * torch.randn(3, 8)
    mine = state("query", "covariance", query=(0, 16), prompt=16)
    for start, end in itertools.pairwise([0, *cuts, 16]):
        feed({"mine": mine}, rows[start:end], ("mine", start, end - start))
    covariance = covariance_input(mine.query)
    assert covariance is not None
    centred = rows.double() - rows.double().mean(0)
    expected = torch.einsum("rhd,rhe->hde", centred, centred) / 16
    both = torch.stack([expected, expected * 4])
    assert (covariance.double() - both).abs().max() < 1e-4 * both.abs().max()
    np.testing.assert_allclose(mine.query.mean()[0].double(), rows.double().mean(0), rtol=1e-5)


def test_one_row_has_no_spread_and_a_glimpse_has_its_own() -> None:
    mine = state("query", "covariance")
    plan = planned(batch(("mine", 0, 40)), {"mine": mine})
    assert plan is not None
    (watched,) = plan.watched
    assert isinstance(watched.into, QueryMoments) and watched.into is not mine.query
    watched.into.add(0, torch.randn(1, 3, 8))
    assert watched.into.covariance().abs().max() == 0
    assert covariance_input(state().query) is None


class Served:
    """A request served by the real pool, backend and forward batches, one layer, through the hooks; and what it should give.

    Attributes:
        expected: `[S]` float64, by slot, from float64 loops over the live rows.
    """

    def __init__(self, page_size: int) -> None:
        self.host = Host(page_size, torch.float32)
        self.backend = CpuAttentionBackend(self.host.runner)
        self.views = self.backend.views = LiveViews(self.host.rows.req_to_token)
        keys = self.host.pool.get_key_buffer(0)
        self.mass = AttentionMass(len(keys), keys.device)
        self.mass.received.fill_(7.0)  # of earlier owners
        self.expected = torch.full((len(keys),), 7.0, dtype=torch.float64)
        self.active = SimpleNamespace(
            scoring=SimpleNamespace(surprise=None, attention=self.mass),
            views=self.views,
            states={},
            running_plan=None,
            **idle(),
            look=lambda *request: None,
        )

    def join(self, rid: str) -> RequestState:
        made = self.active.states[rid] = state("attention")
        made.look = 1 << 30
        layer = self.host.layer
        made.tap = AttentionTap(
            self.mass, self.host.pool.get_key_buffer, self.host.rows.req_to_token, self.views, layer.scaling
        )
        return made

    def forward(self, rids: Sequence[str], ends: Sequence[int], counts: Sequence[int] | None = None) -> None:
        """Compute the last `counts` tokens of rows 1, 2, ... (None: one each, a decode step), which then have `ends` tokens."""
        forward_batch = self.host.batch(list(ends), None if counts is None else list(counts))
        forward_batch.rids = list(rids)
        forward_batch.seq_lens_cpu = forward_batch.seq_lens
        forward_batch.intentkv_rows = forward_batch.req_pool_indices
        new = [1] * len(ends) if counts is None else list(counts)
        if counts is not None:
            forward_batch.extend_seq_lens_cpu = new
            forward_batch.extend_prefix_lens_cpu = [e - n for e, n in zip(ends, new, strict=True)]
        q, k, v = self.host.qkv(sum(new))

        def model(runner: Any, same: Any) -> ModelRunnerOutput:
            self.backend.init_forward_metadata(same)
            output = self.backend.forward(q, k, v, self.host.layer, same)
            assert observer.observe_queries(output, self.backend, q, k, v, self.host.layer, same) is None
            return ModelRunnerOutput(logits_output=None, can_run_graph=False)

        observer.observe_forward(model, None, forward_batch)
        self._expect(q.view(-1, H_Q, DIM), rids, ends, new)

    def _expect(self, queries: Tensor, rids: Sequence[str], ends: Sequence[int], counts: Sequence[int]) -> None:
        rows = self.host.rows.req_to_token
        for row, (end, count) in enumerate(zip(ends, counts, strict=True), start=1):
            self.expected[rows[row, end - count : end].long()] = 0
        keys = self.host.pool.get_key_buffer(0)
        first = 0
        for row, (rid, end, count) in enumerate(zip(rids, ends, counts, strict=True), start=1):
            if rid in self.active.states:
                slots = torch.cat((self.views.slots(row, end - count), rows[row, end - count : end].long()))
                visible = torch.arange(len(slots) - count + 1, len(slots) + 1)
                scale = self.host.layer.scaling
                shares = attention_shares_reference(queries[first : first + count], keys, slots, visible, scale)
                self.expected.index_add_(0, slots, shares.sum((0, 2)))
            first += count

    def drop(self, row: int, holes: list[int], upto: int) -> None:
        """Tombstones in the row, as the cache writes them."""
        positions = torch.tensor(holes)
        self.host.rows.req_to_token[row, positions] = (positions % self.host.page_size).int()
        self.views.set_holes(row, np.array(holes), upto)

    def check(self) -> None:
        torch.testing.assert_close(self.mass.received.double(), self.expected, rtol=1e-5, atol=1e-5)


@pytest.fixture
def served(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Served]:
    made = Served(request.param)
    monkeypatch.setattr(runtime, "_runtime", made.active)
    yield made


pages = pytest.mark.parametrize("served", [1, 16], indirect=True, ids=["page 1", "page 16"])


@pages
@pytest.mark.parametrize("workspace", [1, 200_000, chunks.WORKSPACE_BYTES])
def test_attention_is_received_over_chunks_holes_and_decode_steps(
    monkeypatch: pytest.MonkeyPatch, served: Served, workspace: int
) -> None:
    """Two chunks of a request beside one that is not observed, an event, a chunk behind its holes, three decode steps."""
    monkeypatch.setattr(chunks, "WORKSPACE_BYTES", workspace)
    served.join("mine")
    for row, length in ((1, 90), (2, 40)):
        served.host.fill_row(row, length)
    served.forward(("mine", "other"), (30, 17), (30, 17))
    served.check()
    assert served.mass.received[served.host.rows.req_to_token[1, :30].long()].sum().item() == pytest.approx(30 * H_Q)
    served.forward(("mine", "other"), (60, 20), (30, 3))
    served.drop(1, list(range(16, 48)), 60)
    kept = served.mass.received.clone()
    served.forward(("mine", "other"), (80, 24), (20, 4))
    for end in (81, 82, 83):
        served.forward(("mine", "other"), (end, end - 57))
    served.check()
    dropped = kept[: served.host.page_size]
    assert torch.equal(served.mass.received[: served.host.page_size], dropped), "a tombstone's slot received attention"


@pages
def test_a_slot_starts_at_zero_with_whoever_computes_into_it(served: Served) -> None:
    """Its new owner may be a request that is not observed; one that is observed and shares the slot adds to zero."""
    served.join("mine")
    served.host.fill_row(1, 40)
    served.forward(("mine",), (32,), (32,))
    rows = served.host.rows.req_to_token
    assert (served.mass.received[rows[1, :32].long()] > 0).all()
    served.active.states.clear()
    served.forward(("stranger",), (32,), (32,))  # the same slots, freed and allocated again
    assert (served.mass.received[rows[1, :32].long()] == 0).all()
    served.join("next")
    served.forward(("next",), (40,), (8,))  # reuses them as its prefix
    served.check()
    assert (served.mass.received[rows[1, :32].long()] > 0).all()


@pages
def test_what_was_received_travels_with_shared_slots(served: Served) -> None:
    """A second request over the same prefix adds to what the first one gave, and reads the sum."""
    served.join("one")
    taps = served.join("two").tap
    served.host.fill_row(1, 32)
    served.forward(("one",), (32,), (32,))
    shared = served.host.rows.req_to_token[1, :16].clone()
    before = served.mass.received[shared.long()].clone()
    served.host.fill_row(2, 48)
    served.host.rows.req_to_token[2, :16] = shared
    served.forward(("stranger", "two"), (32, 48), (1, 32))
    served.check()
    assert taps is not None
    assert (taps.received(shared.long()) > before).all()
