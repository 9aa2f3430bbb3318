"""The figures that docs/how-it-works.md promises, from the simulation that prints them."""

import pytest

from scripts.sim_reclaim import fixed, mix, packed, unpruned_equals_stock
from tests.host.pools import publish_settings

publish_settings()


@pytest.fixture(scope="module")
def ample() -> float:
    return fixed(ours=False, size=100_000, page_size=1, core="rust")["hit"]


@pytest.mark.parametrize("size", [30_000, 12_000])
def test_reclaim_keeps_the_hit_rate_of_an_ample_pool(size: int, ample: float) -> None:
    stock = fixed(ours=False, size=size, page_size=1, core="rust")
    ours = fixed(ours=True, size=size, page_size=1, core="rust")
    assert ours["hit"] == ample >= 0.88
    assert stock["hit"] < 0.34
    assert ours["freed"] == ours["dropped"] == 48_896


def test_reclaim_with_larger_pages() -> None:
    ours = fixed(ours=True, size=30_000, page_size=16, core="python")
    assert ours["hit"] >= 0.88 and ours["freed"] == ours["dropped"]


@pytest.mark.parametrize(("kind", "dead_pages", "kept_by_pages"), [("tokens", 0.02, 0.4), ("sentences", 0.9, 0.85)])
def test_reclaim_packs_what_is_left_of_pages(kind: str, dead_pages: float, kept_by_pages: float) -> None:
    row = packed("python", 0.25, kind)
    assert row["packed"] == 1.0 and row["dead_pages"] < dead_pages
    assert row["kept_by_pages"] < kept_by_pages, "to choose whole pages is another choice"


@pytest.mark.parametrize("page_size", [1, 16])
def test_reclaim_without_pruning_is_stock(page_size: int) -> None:
    assert unpruned_equals_stock(page_size, "rust")


def test_reclaim_starves_nobody() -> None:
    """Pruned sessions that go idle must not cost plain ones their place, nor the other way round."""
    stock = mix(ours=False, size=14_000, core="rust", idle_from=7, chunk=1 << 20)
    ours = mix(ours=True, size=14_000, core="rust", idle_from=7, chunk=1024)
    assert all(after >= before for before, after in zip(stock, ours, strict=True)), (stock, ours)
