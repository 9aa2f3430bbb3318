"""Random lives of the cache, for both tree cores, pages of 1 and 16, and both layouts."""

import pytest
from hypothesis import settings
from hypothesis.stateful import run_state_machine_as_test

from tests.property.machine import CacheMachine
from tests.property.totals import TOTALS

CONFIGURATIONS = [
    ("rust", 1, "reclaim", False, False),
    ("python", 1, "reclaim", False, False),
    ("rust", 16, "reclaim", True, False),
    ("python", 16, "reclaim", False, False),
    ("rust", 16, "reclaim", False, True),
    ("rust", 1, "mask", False, False),
    ("rust", 16, "mask", False, False),
]


@pytest.mark.parametrize(("core", "page_size", "layout", "need_sort", "whole_pages"), CONFIGURATIONS)
def test_reclaim_machine(core: str, page_size: int, layout: str, need_sort: bool, whole_pages: bool) -> None:
    before = TOTALS.copy()
    chosen = {"core": core, "page_size": page_size, "layout": layout}
    chosen |= {"need_sort": need_sort, "whole_pages": whole_pages}
    name = f"Machine_{core}_{page_size}_{layout}{'_whole' * whole_pages}"  # what fails is kept under the name
    run_state_machine_as_test(type(name, (CacheMachine,), chosen), settings=settings())
    for count in ("steps", "events", "dropped"):
        assert TOTALS[count] > before[count], f"the machine has met no {count}: it tests nothing"
    packs = page_size > 1 and layout == "reclaim" and not whole_pages
    assert (TOTALS["moved"] > before["moved"]) == packs
    assert (TOTALS["freed"] > before["freed"]) == (layout == "reclaim")


def test_the_machines_together_have_met_everything() -> None:
    """A single one may by chance do without; fewer than ten of a kind in all of them would be too few."""
    counts = (
        "freed",
        "moved",
        "evictions",
        "retractions",
        "aborts",
        "time-outs",
        "flushes",
        "full hits",
        "namespaces_evicted",
    )
    assert {count: TOTALS[count] for count in counts if TOTALS[count] < 10} == {}


def test_a_life_in_which_a_forgotten_text_was_found_again() -> None:
    """Found by `make fuzz`. A text that its session no longer remembers lies in the tree behind a hole; another one leaves its
    path before the hole, and computes the same tokens without it."""
    chosen = {"core": "rust", "page_size": 16, "layout": "mask"}
    life = type("Machine_forgotten", (CacheMachine,), chosen)()
    life.start(seed=1)
    for step in (
        lambda: life.open(scope=None, seed=549, session="a", system=85),
        lambda: life.decode(count=1),
        lambda: life.fork_running(pick=0, same=False, seed=1, session="a"),
        lambda: life.disconnect(pick=0),
        lambda: life.decode(count=1),
        lambda: life.go_on(pick=0, seed=1024),
        lambda: life.decode(count=1),
        lambda: life.edit(cut=0, pick=0, seed=1),
        lambda: life.edit(cut=0, pick=0, seed=42550),
        lambda: life.open(scope=None, seed=1, session="a", system=0),
        lambda: life.fork_running(pick=245, same=False, seed=60699, session="a"),
        lambda: life.decode_to_the_end(),
        lambda: life.decode(count=1),
        lambda: life.edit(cut=65535, pick=0, seed=1),
        lambda: life.decode_to_the_end(),
        lambda: life.go_on(pick=0, seed=1),
        lambda: life.decode_to_the_end(),
        lambda: life.fork_running(pick=0, same=False, seed=1, session="a"),
        lambda: life.decode_to_the_end(),
        lambda: life.decode_to_the_end(),
        lambda: life.fork(pick=0, seed=1, session="a"),
    ):
        step()
        life.everything_holds()
    life.teardown()
