"""Random lives of the cache, for both tree cores, pages of 1 and 16, and both layouts."""

import pytest
from hypothesis import settings
from hypothesis.stateful import run_state_machine_as_test

from tests.property.machine import TOTALS, CacheMachine

CONFIGURATIONS = [
    ("rust", 1, "reclaim", False),
    ("python", 1, "reclaim", False),
    ("rust", 16, "reclaim", True),
    ("python", 16, "reclaim", False),
    ("rust", 1, "mask", False),
    ("rust", 16, "mask", False),
]


@pytest.mark.parametrize(("core", "page_size", "layout", "need_sort"), CONFIGURATIONS)
def test_reclaim_machine(core: str, page_size: int, layout: str, need_sort: bool) -> None:
    chosen = dict(core=core, page_size=page_size, layout=layout, need_sort=need_sort)
    run_state_machine_as_test(type("Machine", (CacheMachine,), chosen), settings=settings())
    print(dict(TOTALS))
