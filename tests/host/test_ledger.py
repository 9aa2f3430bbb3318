"""The ledger on SGLang's own allocators: every wrong free is refused before it happens, every right one passes."""

import pytest
import torch

from intentkv.apply.ledger import LedgerError, SlotLedger
from tests.host.pools import build_allocator

PAGES = 16


@pytest.fixture(params=[(1, False), (1, True), (16, False), (16, True)], ids=lambda p: f"page{p[0]}-sort{p[1]}")
def allocator(request: pytest.FixtureRequest):
    page_size, need_sort = request.param
    return build_allocator(page_size, PAGES * page_size, need_sort)


@pytest.fixture
def ledger(allocator) -> SlotLedger:
    return SlotLedger(allocator)


def free(allocator, slots: torch.Tensor) -> None:
    allocator.free_segment(slots, start_pos=0)


def audit(ledger: SlotLedger, allocator, tree: torch.Tensor | None = None, **private: torch.Tensor) -> list[str]:
    none = torch.empty(0, dtype=torch.int64)
    return ledger.audit(allocator.get_all_free_pages(), none if tree is None else tree, private)


def test_ledger_follows_a_page_through_its_life(ledger: SlotLedger, allocator) -> None:
    slots = allocator.alloc(4 * allocator.page_size)
    assert audit(ledger, allocator, request=torch.unique(slots // allocator.page_size)) == []
    ledger.enter_tree(slots)
    assert audit(ledger, allocator, tree=slots) == []
    ledger.leave_tree(slots)
    free(allocator, slots)
    assert audit(ledger, allocator) == []
    assert allocator.available_size() == PAGES * allocator.page_size


def test_ledger_refuses_a_page_that_is_free(ledger: SlotLedger, allocator) -> None:
    slots = allocator.alloc(2 * allocator.page_size)
    free(allocator, slots)
    with pytest.raises(LedgerError, match="already free"):
        free(allocator, slots)
    assert allocator.available_size() == PAGES * allocator.page_size, "nothing was freed the second time"


def test_ledger_lets_only_held_pages_move(ledger: SlotLedger, allocator) -> None:
    slots = allocator.alloc(4 * allocator.page_size)
    ledger.check_held(slots[1:])
    ledger.enter_tree(slots[: allocator.page_size])
    with pytest.raises(LedgerError, match="still owned by the tree"):
        ledger.check_held(slots)
    free(allocator, slots[-allocator.page_size :])
    with pytest.raises(LedgerError, match="already free"):
        ledger.check_held(slots[-1:])
    with pytest.raises(LedgerError, match="dead page"):
        ledger.check_held(torch.tensor([0]))


def test_ledger_refuses_the_dead_page(ledger: SlotLedger, allocator) -> None:
    with pytest.raises(LedgerError, match="dead page"):
        free(allocator, torch.arange(allocator.page_size))


def test_ledger_refuses_a_page_of_the_tree(ledger: SlotLedger, allocator) -> None:
    slots = allocator.alloc(2 * allocator.page_size)
    ledger.enter_tree(slots[: allocator.page_size])
    with pytest.raises(LedgerError, match="tree"):
        free(allocator, slots)


def test_ledger_refuses_a_page_twice_in_one_free(ledger: SlotLedger, allocator) -> None:
    slots = allocator.alloc(allocator.page_size)
    with pytest.raises(LedgerError, match="twice"):
        free(allocator, torch.cat((slots, slots)))


def test_ledger_refuses_what_another_row_maps(ledger: SlotLedger, allocator) -> None:
    slots = allocator.alloc(2 * allocator.page_size)
    row = torch.zeros(1, 4 * allocator.page_size, dtype=torch.int32)
    row[0, : len(slots)] = slots
    ledger.check_unmapped(slots, row, torch.tensor([0]), by="test")  # mapped beyond the row's length: stale
    with pytest.raises(LedgerError, match="another row"):
        ledger.check_unmapped(slots[-1:], row, torch.tensor([len(slots)]), by="test")


def test_ledger_in_a_free_group(ledger: SlotLedger, allocator) -> None:
    slots = allocator.alloc(3 * allocator.page_size)
    allocator.free_group_begin()
    free(allocator, slots[: allocator.page_size])
    with pytest.raises(LedgerError, match="already free"):
        free(allocator, slots[: allocator.page_size])
    free(allocator, slots[allocator.page_size :])
    assert allocator.available_size() == (PAGES - 3) * allocator.page_size, "the group is still open"
    allocator.free_group_end()
    assert allocator.available_size() == PAGES * allocator.page_size
    assert audit(ledger, allocator) == []


def test_ledger_allows_slots_of_one_page_in_one_free(ledger: SlotLedger, allocator) -> None:
    slots = allocator.alloc(2 * allocator.page_size)
    allocator.free(slots)
    assert audit(ledger, allocator) == []


def test_ledger_forgets_on_clear(ledger: SlotLedger, allocator) -> None:
    allocator.alloc(5 * allocator.page_size)
    allocator.clear()
    assert audit(ledger, allocator) == []


def test_ledger_audit_names_what_is_wrong(ledger: SlotLedger, allocator) -> None:
    slots = allocator.alloc(2 * allocator.page_size)
    pages = torch.unique(slots // allocator.page_size)
    ledger.enter_tree(slots)
    assert any("nobody" in fault for fault in audit(ledger, allocator))
    assert any("found 2 (tree, request)" in fault for fault in audit(ledger, allocator, tree=slots, request=pages))
    assert any("twice in the tree" in fault for fault in audit(ledger, allocator, tree=torch.cat((slots, slots))))
    assert any("dead page" in fault for fault in audit(ledger, allocator, tree=slots, request=torch.zeros(1).long()))
