"""Gives the unquantised bf16 linear layers of a loaded model the CPU kernel of `kernels.linear`."""

import torch
from sglang.srt.layers.linear import LinearBase
from sglang.srt.layers.quantization.unquant import UnquantizedLinearMethod

from intentkv.kernels.linear import has_bf16_gemm, linear


class CpuLinearMethod(UnquantizedLinearMethod):
    """SGLang's unquantised linear method with another product; weights and their loading are as they were."""

    def apply(self, layer: torch.nn.Module, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        return linear(x, layer.get_parameter("weight"), bias)


def install(model: torch.nn.Module) -> int:
    """Swap the method of every bf16 linear layer of `model`, in place, on a CPU without native bf16; returns how many."""
    if has_bf16_gemm():
        return 0
    layers = [
        module
        for module in model.modules()
        if isinstance(module, LinearBase)
        and type(module.quant_method) is UnquantizedLinearMethod
        and module.weight.dtype == torch.bfloat16
    ]
    method = CpuLinearMethod()
    for layer in layers:
        layer.quant_method = method
    return len(layers)
