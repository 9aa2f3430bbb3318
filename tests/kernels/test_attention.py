"""Pruned attention is full attention with -inf at the dropped positions, to the precision of the dtype."""

import numpy as np
import pytest
import torch

from intentkv.kernels.attention import paged_attention
from intentkv.kernels.reference import paged_attention_reference
from tests.kernels.paged import holes_of, paged, plain_attention, rms

HOLES = ["none", "first", "last", "run", "random", "all but one"]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=["bf16", "f32"])
@pytest.mark.parametrize("queries", [1, 9], ids=["decode", "extend"])
@pytest.mark.parametrize("group", [1, 3, 4, 8])
@pytest.mark.parametrize("page_size", [1, 16])
@pytest.mark.parametrize("kind", HOLES)
def test_pruned_is_masked(kind: str, page_size: int, group: int, queries: int, dtype: torch.dtype) -> None:
    case = paged(length=77, queries=queries, group=group, kv_heads=8, page_size=page_size, dtype=dtype)
    holes = holes_of(kind, history=77 - queries)
    exact, exact_lse = paged_attention_reference(
        case.query, case.keys, case.values, [case.row], [queries], case.scale, [case.dropped(holes)]
    )

    out, lse = paged_attention(case.query, case.keys, case.values, [case.live_slots(holes)], [queries], case.scale)

    assert out.dtype == dtype and lse.dtype == torch.float32
    assert rms(out - exact) <= 2 * rms(plain_attention(case, holes) - exact)
    assert (lse.double() - exact_lse).abs().max() <= 1e-5 * exact_lse.abs().max()


def test_batch_of_unequal_requests_is_each_alone() -> None:
    cases = [paged(length=n, queries=t, group=3, seed=n) for n, t in [(40, 1), (5, 5), (64, 7), (1, 1)]]
    offsets = np.cumsum([0] + [len(case.keys) for case in cases])
    keys, values = torch.cat([case.keys for case in cases]), torch.cat([case.values for case in cases])
    slots = [case.row + int(offset) for case, offset in zip(cases, offsets)]

    out, lse = paged_attention(
        torch.cat([case.query for case in cases]), keys, values, slots, [len(c.query) for c in cases], cases[0].scale
    )

    alone = [paged_attention(c.query, c.keys, c.values, [c.row], [len(c.query)], c.scale) for c in cases]
    assert torch.equal(out, torch.cat([x for x, _ in alone]))
    assert torch.equal(lse, torch.cat([x for _, x in alone]))


def test_extend_counts_its_causal_mask_from_the_end() -> None:
    case = paged(length=50, queries=8, group=4)
    together, lse = paged_attention(case.query, case.keys, case.values, [case.row], [8], case.scale)
    for t in range(8):
        row = case.row[: 43 + t]
        single, single_lse = paged_attention(case.query[t : t + 1], case.keys, case.values, [row], [1], case.scale)
        torch.testing.assert_close(together[t : t + 1], single, rtol=0, atol=2e-6)
        torch.testing.assert_close(lse[t : t + 1], single_lse, rtol=0, atol=2e-6)


def test_large_logits_do_not_overflow() -> None:
    case = paged(length=64, queries=4, group=3)
    query = case.query * 1e4
    exact, exact_lse = paged_attention_reference(query, case.keys, case.values, [case.row], [4], case.scale)
    out, lse = paged_attention(query, case.keys, case.values, [case.row], [4], case.scale)
    torch.testing.assert_close(out.double(), exact, rtol=0, atol=1e-2)
    torch.testing.assert_close(lse.double(), exact_lse, rtol=1e-6, atol=0)


def test_every_reason_is_named() -> None:
    case = paged(length=20, queries=2, group=3)
    with pytest.raises(ValueError) as error:
        paged_attention(case.query, case.keys.half(), case.values, [case.row.int(), case.row[:1]], [1, 2], case.scale)
    text = str(error.value)
    assert "one floating dtype" in text and "float16" in text
    assert "2 queries in all" in text and "[1, 2]" in text
    assert "request 0" in text and "int32" in text
    assert "request 1" in text


def test_head_shapes_are_checked() -> None:
    case = paged(length=20, queries=1, group=3)
    with pytest.raises(ValueError, match="multiple of H_kv"):
        paged_attention(case.query[:, :5], case.keys, case.values, [case.row], [1], case.scale)
    with pytest.raises(ValueError, match=r"\[S, H_kv, D\]"):
        paged_attention(case.query, case.keys[:-1], case.values, [case.row], [1], case.scale)


def test_a_slot_outside_the_pool_is_refused() -> None:
    case = paged(length=20, queries=1, group=3)
    row = case.row.clone()
    row[3] = len(case.keys)
    with pytest.raises(IndexError):
        paged_attention(case.query, case.keys, case.values, [row], [1], case.scale)
