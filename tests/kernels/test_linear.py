import pytest
import torch
from torch.nn import functional

from intentkv.kernels.linear import linear


@pytest.mark.parametrize("rows", [1, 8, 9, 40])
@pytest.mark.parametrize("with_bias", [False, True])
def test_linear_is_as_accurate_as_plain_bf16(rows: int, with_bias: bool) -> None:
    torch.manual_seed(rows)
    x, weight, bias = torch.randn(rows, 96).bfloat16(), torch.randn(64, 96).bfloat16(), torch.randn(64).bfloat16()
    bias = bias if with_bias else None
    exact = functional.linear(x.double(), weight.double(), None if bias is None else bias.double())

    out = linear(x, weight, bias)

    plain_error = (functional.linear(x, weight, bias).double() - exact).abs().max()
    assert out.dtype == torch.bfloat16 and out.shape == (rows, 64)
    assert (out.double() - exact).abs().max() <= 2 * plain_error


def test_leading_dimensions_are_kept() -> None:
    x, weight = torch.randn(2, 30, 96).bfloat16(), torch.randn(64, 96).bfloat16()
    assert torch.equal(linear(x, weight), linear(x.flatten(0, 1), weight).unflatten(0, (2, 30)))
