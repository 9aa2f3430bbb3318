"""The rule score over paged keys is the formula's; run in Triton's interpreter too (test_interpreter)."""

import itertools
import math

import pytest
import torch
import triton
from torch import Tensor

from intentkv.kernels import chunks, rule_score
from intentkv.kernels.reference import rule_score_reference
from intentkv.kernels.rule_score import add_rule_score
from tests.kernels.paged import rms

DTYPES = {"f32": torch.float32, "bf16": torch.bfloat16, "f16": torch.float16}


pytestmark = pytest.mark.usefixtures("one_thread")


def case(
    n: int,
    *,
    kv_heads: int = 2,
    group: int,
    dim: int,
    dtype: torch.dtype,
    page_size: int = 1,
    norm: float = 1.0,
    seed=0,
) -> tuple[Tensor, Tensor, Tensor]:
    """Queries of this norm over sqrt(D), a pool of shuffled pages whose page 0 is NaN, and n of its slots in any order."""
    random = torch.Generator().manual_seed(seed)
    pages = -(-n // page_size) + 3
    order = torch.randperm(pages, generator=random) + 1
    slots = (order[:, None] * page_size + torch.arange(page_size)).flatten()
    chosen = slots[torch.randperm(len(slots), generator=random)[:n]]  # of a history with holes, scored in no order
    keys = 3 * torch.randn((pages + 1) * page_size, kv_heads, dim, generator=random)
    keys[:page_size] = float("nan")
    queries = torch.nn.functional.normalize(torch.randn(kv_heads * group, dim, generator=random), dim=-1)
    return queries * norm / math.sqrt(dim), keys.to(dtype), chosen


def plain(queries: Tensor, keys: Tensor, slots: Tensor) -> Tensor:
    """Gather, expand and softmax in the dtype of the keys, as one would write it in PyTorch: `[n]`."""
    gathered = keys[slots].repeat_interleave(len(queries) // keys.shape[1], dim=1)
    logits = torch.einsum("hd,nhd->hn", queries.to(keys.dtype), gathered)
    return logits.softmax(1).sum(0)


def test_the_path_under_test() -> None:
    assert (type(rule_score.share_kernel).__name__ == "InterpretedFunction") == triton.knobs.runtime.interpret


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("dim", "page_size"), [(64, 1), (128, 16)])
@pytest.mark.parametrize("group", [1, 3, 8])
def test_within_twice_the_error_of_plain_pytorch(dtype: str, dim: int, group: int, page_size: int) -> None:
    """As flat as published, and as sharp as the model's own attention; over a few draws, since one is a matter of luck."""
    for norm, (draws, n) in itertools.product((1.0, math.sqrt(dim)), ((8, 2), (5, 33))):
        ours, theirs = [], []
        for seed in range(draws):
            queries, keys, slots = case(
                n, group=group, dim=dim, dtype=DTYPES[dtype], page_size=page_size, norm=norm, seed=seed
            )
            exact = rule_score_reference(queries, keys, slots)
            out = torch.zeros(n)
            add_rule_score(queries, keys, slots, out)
            ours.append(out - exact)
            theirs.append(plain(queries, keys, slots) - exact)
        own, other = torch.cat(ours), torch.cat(theirs)
        assert rms(own) <= 2 * rms(other)
        assert own.abs().max() <= 2 * other.abs().max()


def test_one_token_takes_all_and_an_empty_history_nothing() -> None:
    queries, keys, slots = case(1, group=3, dim=64, dtype=torch.bfloat16)
    out = torch.zeros(1)
    add_rule_score(queries, keys, slots, out)
    assert out.item() == 6.0
    add_rule_score(queries, keys, slots[:0], out[:0])
    assert out.item() == 6.0


def test_a_history_longer_than_the_workspace(monkeypatch: pytest.MonkeyPatch) -> None:
    """Several chunks on the CPU, several blocks a program on a GPU; one token has nearly all the weight of one head."""
    queries, keys, slots = case(200, group=3, dim=64, dtype=torch.float32, norm=8.0)
    keys[slots[150], 1] = 40 * queries[4]
    expected = rule_score_reference(queries, keys, slots)
    monkeypatch.setattr(rule_score, "SPLITS", 3)
    for workspace in (1, 20_000, 100_000):
        monkeypatch.setattr(chunks, "WORKSPACE_BYTES", workspace)
        assert len(list(rule_score._chunks(200, 6, 2, 64))) > 1
        out = torch.zeros(200)
        add_rule_score(queries, keys, slots, out)
        torch.testing.assert_close(out.double(), expected, rtol=1e-5, atol=1e-7)


def test_layers_add_up_the_same_way_each_time_and_nothing_else_is_written() -> None:
    queries, keys, slots = case(73, group=4, dim=64, dtype=torch.bfloat16, page_size=16)
    before = [t.clone() for t in (queries, keys, slots)]
    frame = torch.full((3, 73), 7.0)  # the output is a row in the middle of other memory
    once, again = torch.zeros(73), torch.zeros(73)
    for out in (once, again, frame[1], frame[1]):
        add_rule_score(queries, keys, slots, out)
    assert torch.equal(once, again)
    torch.testing.assert_close(frame[1], 7.0 + 2 * once)
    assert (frame[[0, 2]] == 7.0).all()
    for now, then in zip((queries, keys, slots), before, strict=True):
        assert torch.equal(now.view(torch.uint8), then.view(torch.uint8))


def test_large_logits_stay_finite() -> None:
    queries, keys, slots = case(64, group=3, dim=64, dtype=torch.float32, norm=1e6)
    out = torch.zeros(64)
    add_rule_score(queries, keys, slots, out)
    assert out.isfinite().all()
    assert out.sum().item() == pytest.approx(6, rel=1e-5)


def test_keys_of_a_wider_pool_are_read_by_its_stride() -> None:
    """SGLang may store keys and values of a token side by side."""
    queries, keys, slots = case(40, group=2, dim=64, dtype=torch.float16)
    wide = torch.cat((keys, torch.full_like(keys, float("nan"))), 1)[:, :2]
    assert wide.stride() == (256, 64, 1)
    out, expected = torch.zeros(40), torch.zeros(40)
    add_rule_score(queries, wide, slots, out)
    add_rule_score(queries, keys, slots, expected)
    assert torch.equal(out, expected)


def test_every_reason_is_named() -> None:
    queries, keys, slots = case(10, group=3, dim=64, dtype=torch.float32)
    with pytest.raises(ValueError) as error:
        add_rule_score(queries[:5].double(), keys.int(), slots.int(), torch.zeros(9))
    for part in ("divides H_q", "float32 queries and floating keys", "int64 slots", "out contiguous float32 [10]"):
        assert part in str(error.value)
    with pytest.raises(ValueError, match="heads lie side by side"):
        add_rule_score(queries, keys.transpose(0, 1).contiguous().transpose(0, 1), slots, torch.zeros(10))
    with pytest.raises(ValueError, match="one device, got queries on meta"):
        add_rule_score(queries.to("meta"), keys, slots, torch.zeros(10))
