"""In-place copies of KV slots; run in Triton's interpreter too (test_interpreter)."""

import pytest
import torch

from intentkv.kernels.compact import copy_slots
from intentkv.kernels.reference import copy_slots_reference


def pools(slots: int, heads: int, dim: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """Random bits, NaNs of every kind among them."""
    random = torch.Generator().manual_seed(slots)
    both = torch.randint(0, 256, (2, slots, heads, dim * dtype.itemsize), dtype=torch.uint8, generator=random)
    return both[0].view(dtype), both[1].view(dtype)


def bits(pool: torch.Tensor) -> torch.Tensor:
    return pool.contiguous().view(torch.uint8)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float8_e4m3fn], ids=str)
@pytest.mark.parametrize(("heads", "dim", "pairs"), [(2, 64, 20), (1, 1, 1), (3, 80, 7), (8, 128, 150)])
def test_bit_equal_and_nothing_else_is_written(heads: int, dim: int, pairs: int, dtype: torch.dtype) -> None:
    keys, values = pools(2 * pairs + 5, heads, dim, dtype)
    order = torch.randperm(len(keys), generator=torch.Generator().manual_seed(0))
    sources, destinations = order[:pairs], order[pairs : 2 * pairs]
    expected = [copy_slots_reference(pool, sources, destinations) for pool in (keys, values)]
    copy_slots(keys, values, sources, destinations)
    assert torch.equal(bits(keys), bits(expected[0]))
    assert torch.equal(bits(values), bits(expected[1]))


def test_entries_of_a_fused_pool() -> None:
    """SGLang's keys and values may be two views of one allocation, with a gap from entry to entry."""
    fused = torch.randn(30, 2, 3, 16).bfloat16()
    before = fused.clone()
    copy_slots(fused[:, 0], fused[:, 1], torch.tensor([4, 9]), torch.tensor([20, 21]))
    assert torch.equal(fused[20], before[4]) and torch.equal(fused[21], before[9])
    rest = [i for i in range(30) if i not in (20, 21)]
    assert torch.equal(fused[rest], before[rest])


def test_no_pairs_is_no_copy() -> None:
    keys, values = pools(4, 1, 8, torch.float32)
    none = torch.empty(0, dtype=torch.int64)
    before = bits(keys).clone()
    copy_slots(keys, values, none, none)
    assert torch.equal(bits(keys), before)


def test_every_reason_is_named() -> None:
    keys, values = pools(8, 2, 4, torch.float32)
    with pytest.raises(ValueError) as error:
        copy_slots(keys, values[:7], torch.tensor([1, 2]).int(), torch.tensor([3]))
    for part in ("one dtype and shape", "as many sources as destinations", "int64 slots"):
        assert part in str(error.value)
    with pytest.raises(ValueError, match="contiguous entries"):
        copy_slots(keys.transpose(1, 2), values.transpose(1, 2), torch.tensor([1]), torch.tensor([3]))
