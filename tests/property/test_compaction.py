"""Random lives of a paged pool whose requests drop single tokens, and compact; and single plans at random."""

from dataclasses import dataclass, field

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from intentkv.apply.compaction import CompactionPlan, pack_pages, plan_compaction
from intentkv.apply.rows import tombstones
from intentkv.kernels.compact import copy_slots

SEEDS = st.integers(0, 2**32 - 1)
PAGES = 40
HEADS, DIM = 2, 8


@dataclass
class Request:
    """A request: its row, what every position's KV must be, and which pages others can read too."""

    row: np.ndarray = field(default_factory=lambda: np.zeros(0, np.int64))
    text: np.ndarray = field(default_factory=lambda: np.zeros(0, np.int64))
    live: np.ndarray = field(default_factory=lambda: np.zeros(0, bool))


class Pool:
    """A paged pool with contents. A page is free, one request's, or shared (the tree's, or mapped by two rows)."""

    def __init__(self, page_size: int) -> None:
        self.page_size = page_size
        self.free = list(range(1, PAGES))
        self.shared: set[int] = set()
        shape = (PAGES * page_size, HEADS, DIM)
        self.keys = torch.zeros(shape, dtype=torch.bfloat16)
        self.values = torch.zeros(shape, dtype=torch.bfloat16)
        self.requests = [Request(), Request(), Request()]
        self.written = 0

    def append(self, request: Request, count: int) -> None:
        for _ in range(count):
            if len(request.row) % self.page_size == 0:
                if not self.free:
                    return
                slot = self.free.pop(0) * self.page_size
            else:
                slot = int(request.row[-1]) + 1
            self.written += 1
            entry = torch.full((HEADS, DIM), self.written, dtype=torch.int16)
            self.keys[slot], self.values[slot] = entry.view(torch.bfloat16), (-entry).view(torch.bfloat16)
            request.row = np.append(request.row, slot)
            request.text = np.append(request.text, self.written)
            request.live = np.append(request.live, True)

    def drop(self, request: Request, chosen: np.ndarray) -> None:
        """Tombstones, where only the page that the next token continues is out of reach."""
        chosen = chosen[chosen < max(0, len(request.row) - 1) // self.page_size * self.page_size]
        chosen = chosen[request.live[chosen]]
        held = self.pages(request)
        request.live[chosen] = False
        request.row[chosen] = tombstones(chosen, self.page_size)
        self.release(held - self.pages(request))

    def release(self, pages: set[int]) -> None:
        self.free += sorted(page for page in pages if page not in self.shared)

    def pages(self, request: Request) -> set[int]:
        return set((request.row[request.live] // self.page_size).tolist())

    def compact(self, request: Request) -> CompactionPlan:
        last = len(request.row) // self.page_size * self.page_size
        private = np.array([int(slot) // self.page_size not in {0, *self.shared} for slot in request.row], bool)
        private[last:] = False
        plan = plan_compaction(request.row, request.live, private, self.page_size)
        before = [pool.clone() for pool in (self.keys, self.values)]
        copy_slots(self.keys, self.values, torch.from_numpy(plan.sources), torch.from_numpy(plan.destinations))
        self.check(request, plan, private, before)
        request.row = plan.apply_to(request.row)
        self.free += plan.freed.tolist()
        return plan

    def check(self, request: Request, plan: CompactionPlan, private: np.ndarray, before: list[torch.Tensor]) -> None:
        """All that a plan promises, for the plan itself and for what its copies did."""
        assert len(plan.sources) == len(plan.destinations) == len(plan.positions)
        assert not np.intersect1d(plan.sources, plan.destinations).size
        assert len(np.unique(plan.sources)) == len(plan.sources)
        assert len(np.unique(plan.destinations)) == len(plan.destinations)
        assert not np.isin(plan.destinations, request.row[request.live]).any(), "a survivor is overwritten"
        touched = np.concatenate([plan.sources, plan.destinations]) // self.page_size
        foreign = {0, *self.shared, *self.free}
        assert not foreign & {*touched.tolist(), *plan.freed.tolist()}
        others = [other for other in self.requests if other is not request]
        assert not any(self.pages(other) & {*touched.tolist(), *plan.freed.tolist()} for other in others)
        own = private & request.live
        pages = {*(plan.apply_to(request.row)[own] // self.page_size).tolist()}
        assert len(pages) == -(-int(own.sum()) // self.page_size), "more pages than needed are kept"
        assert not pages & set(plan.freed.tolist())
        held = {*(request.row[own] // self.page_size).tolist()}
        assert set(plan.freed.tolist()) == held - pages
        for pool, old in zip((self.keys, self.values), before, strict=True):
            expected = old.clone()
            expected[plan.destinations] = old[plan.sources]
            assert torch.equal(pool.view(torch.int16), expected.view(torch.int16))


class Machine(RuleBasedStateMachine):
    """Requests write, drop, share and compact; whatever happens, each reads its own text and pages have one owner."""

    moved = 0
    freed = 0

    @initialize(page_size=st.sampled_from([1, 2, 4, 16]))
    def start(self, page_size: int) -> None:
        self.pool = Pool(page_size)

    @rule(pick=st.integers(0, 2), count=st.integers(8, 60))
    def append(self, pick: int, count: int) -> None:
        self.pool.append(self.pool.requests[pick], count)

    @rule(pick=st.integers(0, 2), seed=SEEDS, share=st.sampled_from([0.1, 0.5, 0.9]))
    def drop(self, pick: int, seed: int, share: float) -> None:
        request = self.pool.requests[pick]
        self.pool.drop(request, np.flatnonzero(np.random.default_rng(seed).random(len(request.row)) < share))

    @rule(pick=st.integers(0, 2), seed=SEEDS)
    def share(self, pick: int, seed: int) -> None:
        """The tree takes some pages over, or another row maps them."""
        pages = sorted(self.pool.pages(self.pool.requests[pick]))
        chosen = np.random.default_rng(seed).random(len(pages)) < 0.1
        self.pool.shared |= {page for page, taken in zip(pages, chosen, strict=True) if taken}

    @rule(pick=st.integers(0, 2))
    def finish(self, pick: int) -> None:
        pages = self.pool.pages(self.pool.requests[pick])
        self.pool.requests[pick] = Request()
        self.pool.release(pages)

    @rule(pick=st.integers(0, 2), count=st.integers(20, 100), seed=SEEDS)
    def event(self, pick: int, count: int, seed: int) -> None:
        """What a long turn does."""
        self.append(pick, count)
        self.drop(pick, seed, 0.5)
        self.compact(pick)

    @precondition(lambda self: any(len(r.row) for r in self.pool.requests))
    @rule(pick=st.integers(0, 2))
    def compact(self, pick: int) -> None:
        plan = self.pool.compact(self.pool.requests[pick])
        Machine.moved += len(plan.sources)
        Machine.freed += len(plan.freed)
        again = self.pool.compact(self.pool.requests[pick])
        assert not len(again.sources) and not len(again.freed), "a second compaction finds more to do"

    @invariant()
    def every_row_reads_its_own_text(self) -> None:
        for request in self.pool.requests:
            entries = self.pool.keys[request.row[request.live]].view(torch.int16)[:, 0, 0]
            assert entries.tolist() == request.text[request.live].tolist()

    @invariant()
    def every_page_has_one_owner(self) -> None:
        owners = [*self.pool.free]
        for request in self.pool.requests:
            owners += self.pool.pages(request)
        private = [page for page in owners if page not in self.pool.shared]
        assert len(private) == len(set(private)) and 0 not in private


def test_compaction_machine() -> None:
    Machine.moved = Machine.freed = 0
    run_state_machine_as_test(Machine, settings=settings(max_examples=40))
    assert Machine.moved > 100 and Machine.freed > 20, "the machine has compacted hardly anything: it tests nothing"


@given(SEEDS, st.sampled_from([1, 2, 16]), st.integers(0, 200))
def test_a_single_plan_over_shuffled_pages(seed: int, page_size: int, length: int) -> None:
    """Any order of pages, any mask: the fewest pages stay, and no more is moved than what the emptiest pages hold."""
    rng = np.random.default_rng(seed)
    pages = rng.permutation(-(-length // page_size)) + 1
    row = (pages[:, None] * page_size + np.arange(page_size)).ravel()[:length]
    keep, private = rng.random(length) < rng.random(), np.ones(length, bool)
    plan = plan_compaction(row, keep, private, page_size)
    counts = np.sort(np.bincount(row[keep] // page_size, minlength=len(pages) + 1)[1:])
    needed = -(-int(keep.sum()) // page_size)
    assert len(plan.sources) == counts[: len(counts) - needed].sum()
    assert len(plan.freed) == len(pages) - needed
    assert not np.intersect1d(plan.sources, plan.destinations).size


@given(SEEDS, st.sampled_from([1, 2, 16]), st.integers(0, 12))
def test_entries_are_packed_page_by_page(seed: int, page_size: int, pages: int) -> None:
    """What `pack_pages` says of every kept place is what stands there once the copies are done; nothing is lost."""
    rng = np.random.default_rng(seed)
    keep = rng.random(pages * page_size) < rng.random()
    packing = pack_pages(keep, page_size)
    content = np.where(keep, np.arange(len(keep)), -1)
    content[packing.destinations] = content[packing.sources]
    assert packing.holds.tolist() == content[packing.places].tolist()
    assert sorted(packing.holds[packing.holds >= 0].tolist()) == np.flatnonzero(keep).tolist()
    assert (packing.holds < 0).sum() < page_size
    assert sorted([*packing.places, *packing.freed]) == list(range(len(keep)))
    for part in (packing.places, packing.freed):
        assert (part.reshape(-1, page_size) == part[::page_size, None] + np.arange(page_size)).all(), "whole pages"
        assert not (part[::page_size] % page_size).any()


def test_half_pages_are_not_packed() -> None:
    with pytest.raises(ValueError, match="whole pages of 16"):
        pack_pages(np.ones(17, bool), 16)


def test_the_drawing() -> None:
    row = np.arange(4, 20)
    keep = np.array([c != "." for c in "A..B.CD.EFG...H."])
    plan = plan_compaction(row, keep, np.ones(16, bool), 4)
    assert plan.positions.tolist() == [0, 3, 14]
    assert plan.destinations.tolist() == [8, 11, 15]
    assert plan.freed.tolist() == [1, 4]


@pytest.mark.parametrize(
    ("row", "keep", "message"),
    [([4, 5, 0], [1, 1, 1], "outside page 0"), ([4, 4, 5], [1, 1, 1], "stands twice"), ([4, 5], [1], "one shape")],
)
def test_rows_that_cannot_be(row: list[int], keep: list[int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        plan_compaction(np.array(row), np.array(keep, bool), np.ones(len(row), bool), 2)
