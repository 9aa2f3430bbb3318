"""Attention shares against one softmax a query and head in float64."""

import math

import pytest
import torch
from torch import Tensor

from intentkv.kernels import chunks
from intentkv.kernels.attention_shares import ROWS, attention_shares
from intentkv.kernels.reference import attention_shares_reference

DIM = 64
SCALE = DIM**-0.5


def case(queries: int, slots: int, group: int, dtype: torch.dtype, seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    """Queries `[T, 2 G, D]`, a pool of keys that has NaN where no slot leads, and slots in random order."""
    generator = torch.Generator().manual_seed(seed)
    pool = slots + 7
    keys = (torch.randn(pool, 2, DIM, generator=generator) * 2).to(dtype)
    order = torch.randperm(pool, generator=generator)
    keys[order[slots:]] = math.nan
    return torch.randn(queries, 2 * group, DIM, generator=generator).to(dtype), keys, order[:slots]


def gathered(queries: Tensor, keys: Tensor, slots: Tensor, visible: Tensor) -> Tensor:
    """All shares in one tensor, `[H_q, m, T]`; a pair that comes twice would show as more than its share."""
    shares = torch.zeros(queries.shape[1], len(slots), len(queries))
    for rows, chunk, part in attention_shares(queries, keys, slots, visible, SCALE):
        shares[:, chunk, rows] += part.permute(0, 2, 1, 3).flatten(0, 1)
    return shares


def plain(queries: Tensor, keys: Tensor, slots: Tensor, visible: Tensor) -> Tensor:
    """What one would write in PyTorch, in the precision of the keys."""
    expanded = keys[slots].repeat_interleave(queries.shape[1] // keys.shape[1], dim=1)
    logits = torch.einsum("thd,mhd->hmt", queries, expanded) * SCALE
    hidden = torch.arange(len(slots))[:, None] >= visible
    return logits.masked_fill(hidden, -math.inf).softmax(1)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("group", [1, 3, 4])
@pytest.mark.parametrize(("queries", "slots"), [(1, 1), (1, 90), (8, 90), (90, 90), (ROWS + 1, 2 * ROWS)])
@pytest.mark.parametrize("workspace", [20_000, 300_000, chunks.WORKSPACE_BYTES])
def test_equals_the_loop_within_twice_the_error_of_plain_pytorch(
    monkeypatch: pytest.MonkeyPatch, workspace: int, queries: int, slots: int, group: int, dtype: torch.dtype
) -> None:
    monkeypatch.setattr(chunks, "WORKSPACE_BYTES", workspace)
    ours = theirs = 0.0
    for seed in range(3):
        q, keys, order = case(queries, slots, group, dtype, seed)
        visible = torch.arange(slots - queries + 1, slots + 1)
        expected = attention_shares_reference(q, keys, order, visible, SCALE)
        ours = max(ours, (gathered(q, keys, order, visible).double() - expected).abs().max().item())
        theirs = max(theirs, (plain(q, keys, order, visible).double() - expected).abs().max().item())
    assert ours <= max(2 * theirs, torch.finfo(torch.float32).eps)


def test_any_visibility() -> None:
    """Queries need not be in order, nor see different keys."""
    q, keys, order = case(6, 30, 3, torch.float32)
    visible = torch.tensor([30, 1, 7, 7, 29, 2])
    expected = attention_shares_reference(q, keys, order, visible, SCALE)
    torch.testing.assert_close(gathered(q, keys, order, visible).double(), expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("group", [1, 3, 4])
def test_the_largest_logit_of_a_group(monkeypatch: pytest.MonkeyPatch, group: int) -> None:
    q, keys, order = case(5, 40, group, torch.float32)
    expected = torch.zeros(2, 40, 5, dtype=torch.float64)
    for h in range(2):
        for t in range(5):
            logits = [SCALE * keys[order, h].double() @ q[t, h * group + g].double() for g in range(group)]
            expected[h, :, t] = torch.stack(logits).amax(0).softmax(0)
    monkeypatch.setattr(chunks, "WORKSPACE_BYTES", 30_000)
    shares = torch.zeros(2, 40, 5)
    parts = list(attention_shares(q, keys, order, torch.full((5,), 40), SCALE, group="max"))
    assert len(parts) > 1
    for _, chunk, part in parts:
        shares[:, chunk] += part[:, :, 0]
    torch.testing.assert_close(shares.double(), expected, rtol=1e-5, atol=1e-6)


def test_the_workspace_stays_below_32_mib_whatever_the_length() -> None:
    n, heads = 2**17, 9
    keys, q = torch.randn(n, 3, DIM), torch.randn(70, heads, DIM)
    visible = torch.arange(n - 69, n + 1)
    received = torch.zeros(n)
    order = torch.arange(n)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        for _, chunk, part in attention_shares(q[:1], keys, order, visible[:1], SCALE):
            received[chunk] += part.sum(dim=(0, 2, 3))
        # Far more logits a key: the first rows of the many-row case are enough to see the largest chunk.
        next(attention_shares(q, keys[:8000], order[:8000], torch.full((70,), 8000), SCALE))
    events = [e for e in profile.profiler.kineto_results.events() if e.name() == "[memory]"]  # type: ignore[union-attr]
    held = peak = 0
    for event in sorted(events, key=lambda e: e.start_ns()):
        held += event.nbytes()
        peak = max(peak, held)
    assert peak > 2**20, "the profiler saw the allocations"
    assert peak < 32 * 2**20
    assert received.sum().item() == pytest.approx(heads, rel=1e-4)


def test_what_does_not_fit_is_refused_with_every_reason() -> None:
    q, keys, order = case(2, 9, 3, torch.float32)
    with pytest.raises(ValueError, match="expected every query to see 1 to 9 keys, got 0 to 10"):
        next(attention_shares(q, keys, order, torch.tensor([0, 10]), SCALE))
    with pytest.raises(ValueError, match=r"H_kv dividing H_q, got \[2, 6, 64\] and \[16, 2, 32\]; expected one count"):
        next(attention_shares(q, keys[..., :32], order, torch.tensor([1]), SCALE))
