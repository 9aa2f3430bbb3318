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
