"""bf16 linear layers for CPUs without bf16 instructions, alone and inside SGLang's own layers."""

import pytest
import torch
from sglang.srt.layers.linear import ReplicatedLinear
from torch.nn import functional

from intentkv.engine import cpu_linear
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


def sglang_layers(dtype: torch.dtype) -> torch.nn.ModuleList:
    layers = torch.nn.ModuleList(ReplicatedLinear(96, 64, bias=False, params_dtype=dtype) for _ in range(2))
    for layer in layers:
        torch.nn.init.normal_(layer.weight)
    return layers


def test_a_models_bf16_layers_are_swapped_and_compute_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu_linear, "has_bf16_gemm", lambda: False)
    layers, x = sglang_layers(torch.bfloat16), torch.randn(40, 96).bfloat16()
    before, _ = layers[0](x)
    assert cpu_linear.install(layers) == 2
    after, _ = layers[0](x)
    torch.testing.assert_close(after, before, rtol=2**-7, atol=1e-2)
    assert torch.equal(after, linear(x, layers[0].weight))
    assert cpu_linear.install(layers) == 0


def test_nothing_is_swapped_where_it_would_not_help(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu_linear, "has_bf16_gemm", lambda: False)
    assert cpu_linear.install(sglang_layers(torch.float32)) == 0
    monkeypatch.setattr(cpu_linear, "has_bf16_gemm", lambda: True)
    assert cpu_linear.install(sglang_layers(torch.bfloat16)) == 0
