"""bf16 linear layers for CPUs that have no bf16 matrix instructions (AVX2 and older).

There PyTorch multiplies bf16 matrices with a fallback whose cost grows by a whole pass over the weight with every row. One row
is fine: the pass is bound by reading the weight, and bf16 is half of float32. From about ten rows on it is cheaper to widen the
weight once and use the float32 GEMM; at 512 rows of a 3072 x 576 weight, 13 ms against 96 ms on two Zen 3 cores. The float32
product is also the more accurate of the two: one rounding, at the end.
"""

import torch
from torch.nn import functional

_NARROW_ROWS = 8


def has_bf16_gemm() -> bool:
    """Whether this CPU multiplies bf16 matrices natively, so that `linear` has nothing to add."""
    return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())


def linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """`x @ weight.T + bias` for `x` `[..., I]`, `weight` `[O, I]`, `bias` `[O]`, all bf16; returns `[..., O]` bf16."""
    if x.numel() <= _NARROW_ROWS * x.shape[-1]:
        return functional.linear(x, weight, bias)
    return functional.linear(x.float(), weight.float(), None if bias is None else bias.float()).to(x.dtype)
