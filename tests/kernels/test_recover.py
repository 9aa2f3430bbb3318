"""Recovered attention is the softmax that paged attention computed; run in Triton's interpreter too (test_interpreter)."""

import pytest
import torch
import triton

from intentkv.kernels import recover
from intentkv.kernels.attention import paged_attention
from intentkv.kernels.lse import log_sum_exp
from intentkv.kernels.recover import recover_attention
from intentkv.kernels.reference import recover_attention_reference
from intentkv.kernels.slot_lists import SlotLists
from tests.kernels.paged import rms

SHAPES = [  # lengths, KV heads, group, D
    pytest.param([40, 1, 17], 2, 3, 64, id="ragged"),
    pytest.param([40], 1, 1, 32, id="one head"),
    pytest.param([5, 50], 2, 8, 128, id="wide group"),
    pytest.param([33, 0, 31], 3, 2, 80, id="an empty request, D 80"),
]


def case(
    lengths: list[int], kv_heads: int, group: int, dim: int, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor, list[torch.Tensor]]:
    """Queries, a shuffled pool whose page 0 is NaN, and slot lists that do not overlap."""
    random = torch.Generator().manual_seed(sum(lengths))
    order = torch.randperm(2 * sum(lengths), generator=random) + 16
    slots = list(order[: sum(lengths)].split(lengths))
    keys = torch.randn(len(order) + 16, kv_heads, dim, generator=random).to(dtype)
    keys[:16] = float("nan")
    return torch.randn(len(lengths), kv_heads * group, dim, generator=random).to(dtype), keys, slots


def plain(
    query: torch.Tensor, keys: torch.Tensor, slots: list[torch.Tensor], scale: float, from_lse: bool
) -> torch.Tensor:
    """Gather and softmax in the dtype of the case, as one would write it in PyTorch: `[H_kv, N]`.

    With `from_lse` the softmax is written `exp(logit - LSE)`: in float32 the rounding of the LSE itself, which attention
    hands over in float32, is what remains of the error.
    """
    group = query.shape[1] // keys.shape[1]
    parts = []
    for q, index in zip(query, slots, strict=True):
        gathered = keys[index].repeat_interleave(group, dim=1)
        logits = torch.einsum("hd,nhd->hn", q, gathered) * scale
        shares = (logits - logits.logsumexp(1, keepdim=True)).exp() if from_lse else logits.softmax(1)
        parts.append(shares.view(keys.shape[1], group, len(index)).amax(1))
    return torch.cat(parts, 1)


def test_the_path_under_test() -> None:
    assert (type(recover.recover_kernel).__name__ == "InterpretedFunction") == triton.knobs.runtime.interpret


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=["f32", "bf16", "f16"])
@pytest.mark.parametrize(("lengths", "kv_heads", "group", "dim"), SHAPES)
def test_within_twice_the_error_of_plain_pytorch(
    lengths: list[int], kv_heads: int, group: int, dim: int, dtype: torch.dtype
) -> None:
    query, keys, slots = case(lengths, kv_heads, group, dim, dtype)
    scale = dim**-0.5
    lists = SlotLists.of(slots)
    exact, exact_lse = recover_attention_reference(query, keys, slots, scale)

    lse = log_sum_exp(query, keys, lists, scale)
    out = torch.zeros(kv_heads, len(lists.slots))
    recover_attention(query, keys, lists, lse, scale, out)

    expected = torch.cat(exact, 1)
    error = out - expected
    softmax, written_out = (plain(query, keys, slots, scale, from_lse) - expected for from_lse in (False, True))
    assert rms(error) <= 2 * rms(softmax)
    assert error.abs().max() <= 2 * (written_out if dtype == torch.float32 else softmax).abs().max()
    finite = exact_lse.isfinite()
    assert torch.equal(lse.isfinite(), finite)
    assert (lse.double() - exact_lse)[finite].abs().max() <= 1e-5 * exact_lse[finite].abs().max()


def test_with_the_lse_of_the_attention_that_just_ran() -> None:
    query, keys, slots = case([48, 20], 2, 3, 64, torch.float32)
    values = torch.randn_like(keys)
    _, lse = paged_attention(query, keys, values, slots, [1, 1], 0.125)
    lists, out = SlotLists.of(slots), torch.zeros(2, 68)
    recover_attention(query, keys, lists, lse, 0.125, out)
    expected = torch.cat(recover_attention_reference(query, keys, slots, 0.125)[0], 1)
    torch.testing.assert_close(out.double(), expected, rtol=1e-5, atol=1e-7)


def test_calls_add_up_and_nothing_else_is_written() -> None:
    query, keys, slots = case([40, 33], 2, 2, 64, torch.bfloat16)
    lists = SlotLists.of(slots)
    lse = log_sum_exp(query, keys, lists, 0.125)
    before = [t.clone() for t in (query, keys, lists.slots, lists.starts, lse)]
    frame = torch.full((4, 73), 7.0)  # the output is two rows in the middle of other memory
    out = frame[1:3]
    once = torch.zeros(2, 73)
    recover_attention(query, keys, lists, lse, 0.125, once)
    recover_attention(query, keys, lists, lse, 0.125, out)
    recover_attention(query, keys, lists, lse, 0.125, out)
    torch.testing.assert_close(out, 7.0 + 2 * once)
    assert (frame[[0, 3]] == 7.0).all()
    for now, then in zip((query, keys, lists.slots, lists.starts, lse), before, strict=True):
        assert torch.equal(now.view(torch.uint8), then.view(torch.uint8))


def test_large_logits_stay_finite() -> None:
    query, keys, slots = case([64], 2, 3, 64, torch.float32)
    lists, out = SlotLists.of(slots), torch.zeros(2, 64)
    lse = log_sum_exp(query * 1e4, keys, lists, 0.125)
    recover_attention(query * 1e4, keys, lists, lse, 0.125, out)
    assert out.isfinite().all() and out.max() <= 1 + 1e-2


def test_every_reason_is_named() -> None:
    query, keys, slots = case([10, 10], 2, 3, 64, torch.float32)
    lists = SlotLists.of([s.int() for s in slots])
    with pytest.raises(ValueError) as error:
        recover_attention(query[:1, :5], keys, lists, torch.zeros(1, 6), 1.0, torch.zeros(2, 19))
    for part in (
        "H_kv dividing H_q",
        "one query and one slot list",
        "int64 slots",
        "an LSE of float32",
        "out contiguous",
    ):
        assert part in str(error.value)
    with pytest.raises(ValueError, match="heads lie side by side"):
        log_sum_exp(query, keys.transpose(0, 1).contiguous().transpose(0, 1), SlotLists.of(slots), 1.0)
