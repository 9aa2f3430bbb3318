"""Pruned rows through SGLang's own decode-graph runner, without a GPU: see `graph_by_hand.py` for what is real there."""

from __future__ import annotations

from pathlib import Path

import pytest

from intentkv.evals.model import tiny_checkpoint
from tests.gpu.process import assert_exact, run_exact


@pytest.mark.parametrize("page_size", [1, 16])
def test_replayed_decode_graphs_read_what_is_live(page_size: int, tmp_path: Path) -> None:
    """Captured with rows of one token, replayed over pruned and unpruned rows that grow, with a padded request: logits
    and the queries that the graph keeps are as near to float64 as where nothing was dropped."""
    model = tiny_checkpoint(tmp_path / "model", kind="qwen3", layers=2, heads=4, kv_heads=2, head_dim=32)
    # Float32, because Triton's interpreter has no bfloat16 products.
    flags = ["--device", "cpu", "--attention-backend", "triton", "--dtype", "float32", "--page-size", str(page_size)]
    result, end = run_exact(model, flags, tmp_path / "log", "tests.views.graph_by_hand", TRITON_INTERPRET="1")
    assert result is not None, end
    assert (result["backend"], result["page_size"]) == ("LiveTritonAttnBackend", page_size)
    assert result["replayed"] == 6 and "queries, pruned" in result["figures"]
    assert_exact(result)
