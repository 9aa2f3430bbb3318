"""How sure the model is of what it writes, and whether that is going down (ActKV, section 6.1).

A *larger* token confidence means a more peaked distribution: it is the negative mean of the log-probabilities of the
k likeliest tokens, and where one token has all the mass the others' are far below zero. It does not fall all the way
to the flat distribution: its least value, log k, is that of k equal tokens; V equal tokens give log V.
"""

import math
from typing import Final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

TOP_K: Final = 20
WINDOW: Final = 64  # tokens a window of the trace
STRIDE: Final = 8
BOTTOM_PERCENT: Final = 10
_BLOCK: Final = 64  # so that a vocabulary has far more blocks than there are likeliest tokens
_LOG_TINY: Final = math.log(torch.finfo(torch.float32).tiny)  # a token of no probability, -inf, would hide all others


def token_confidence(logits: Tensor, k: int = TOP_K) -> Tensor:
    """`T_i = -(1/k) sum over the k likeliest tokens of log P_i(j)`, `[B]` float32 on the device of `logits`.

    Args:
        logits: `[B, V]`, any float dtype, not normalised; read only. A V below k uses all of them.
    """
    # One vectorised kernel; on a CPU logsumexp is several, and takes most of the time.
    log_p = logits.log_softmax(dim=1, dtype=torch.float32)
    return -_largest(log_p, k).clamp_(min=_LOG_TINY).mean(dim=1)


def _largest(values: Tensor, k: int) -> Tensor:
    """The k largest of each row of `[B, V]`, in any order: they lie in the k blocks whose largest values are the largest."""
    whole = values.shape[1] // _BLOCK * _BLOCK
    if whole <= k * _BLOCK:
        return values.topk(min(k, values.shape[1]), dim=1, sorted=False).values
    blocks = values[:, :whole].view(len(values), whole // _BLOCK, _BLOCK)
    best = blocks.amax(2).topk(k, dim=1, sorted=False).indices
    candidates = blocks.gather(1, best[:, :, None].expand(-1, -1, _BLOCK)).flatten(1)
    return torch.cat([candidates, values[:, whole:]], dim=1).topk(k, dim=1, sorted=False).values


class ConfidenceTrace:
    """The token confidences of one session and their trend.

    A window of the last `WINDOW` tokens gives its minimum every `STRIDE` tokens; of these minima the lowest
    `BOTTOM_PERCENT` percent make up the trace. Keeps one number a stride and the tokens of one window.
    """

    def __init__(self) -> None:
        self._recent: list[float] = []
        self._minima: list[float] = []

    def append(self, confidence: float) -> None:
        """One more token; what is not a number is left out."""
        if not math.isfinite(confidence):
            return
        self._recent.append(confidence)
        if len(self._recent) == WINDOW:
            self._minima.append(min(self._recent))
            del self._recent[:STRIDE]

    def __len__(self) -> int:
        """Windows so far."""
        return len(self._minima)

    def trace(self) -> NDArray[np.float64]:
        """The window minima at or below their `BOTTOM_PERCENT`-th percentile, in order, `[r]` float64."""
        minima = np.array(self._minima)
        return minima[minima <= np.percentile(minima, BOTTOM_PERCENT)] if len(minima) else minima

    def slope(self) -> float:
        """Least-squares slope of the trace over its index; below 0 where confidence goes down, 0 for less than two."""
        trace = self.trace()
        if len(trace) < 2:
            return 0.0
        index = np.arange(len(trace)) - (len(trace) - 1) / 2
        return float(index @ (trace - trace.mean()) / (index @ index))
