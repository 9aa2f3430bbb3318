"""Invariant 4 on every attention backend: pruned output = full attention with -inf at the dropped positions."""

from __future__ import annotations

from pathlib import Path

from tests.gpu.conftest import ON_CPU, Backends, Setup
from tests.gpu.process import assert_exact, run_exact


def test_sglang_has_at_least_one_backend_here(backends: Backends) -> None:
    name = "intentkv_cpu" if ON_CPU else "triton"
    assert backends.problem(name) is None


def test_backend_reads_what_is_live(setup: Setup, model: Path, tmp_path: Path) -> None:
    """Logits behind a drop, and with decode graphs the queries that they keep, against float64."""
    result, end = run_exact(model, setup.flags, tmp_path / "exact.log")
    assert result is not None, end
    assert result["page_size"] == setup.page_size
    assert (result["replayed"] > 0) == setup.graphs
    assert_exact(result)
