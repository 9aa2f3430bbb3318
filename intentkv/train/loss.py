"""The training loss of the residual head."""

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

MAX_PAIRS = 64  # positives, and hard negatives, of one row that are compared with each other


@dataclass(frozen=True)
class LossWeights:
    """Weights of the terms; the published method names the terms and not the numbers, these are ours.

    Attributes:
        ranking, keep, memory: of the hard-negative ranking, the keep-probability and the memory-norm term (eta). The
            weight of the binary cross-entropy is 1.
        keep_share: the share of a history that is to have a keep probability near one.
        max_positive_weight: positives count as much as all negatives together, up to this factor.
    """

    ranking: float = 1.0
    keep: float = 0.1
    memory: float = 0.01
    keep_share: float = 0.25
    max_positive_weight: float = 20.0


def row_loss(scores: Tensor, positive: Tensor, counted: Tensor, memory_error: float, weights: LossWeights) -> Tensor:
    """`BCE + ranking + keep-probability + eta (|M| - 1)^2` of one row (IntentKV, loss): a scalar.

    The keep probability of a token is sigmoid(s_j). Ranking is the mean of softplus(s_neg - s_pos) over the positives
    and the negatives with the highest scores. Keep-probability is (mean of it - keep_share)^2. The memory's norm does
    not depend on the head, so its term has no gradient here: it is zero while the memory is sound, and shows where
    it is not.

    Args:
        scores: `[n]`, s_j. positive: `[n]` bool, at least one True where `counted`. counted: `[n]` bool, tokens that take
            part. memory_error: mean of (|M_t| - 1)^2.
    """
    scores, target = scores[counted], positive[counted]
    chosen, others = scores[target], scores[~target]
    balance = min(weights.max_positive_weight, max(1.0, len(others) / len(chosen)))
    bce = functional.binary_cross_entropy_with_logits(
        scores, target.to(scores.dtype), pos_weight=scores.new_tensor(balance)
    )
    ranking = scores.new_zeros(())
    if len(others):
        hard = others.topk(min(MAX_PAIRS, len(others))).values
        weak = chosen.topk(min(MAX_PAIRS, len(chosen)), largest=False).values
        ranking = functional.softplus(hard.unsqueeze(0) - weak.unsqueeze(1)).mean()
    keep = (torch.sigmoid(scores).mean() - weights.keep_share).square()
    return bce + weights.ranking * ranking + weights.keep * keep + weights.memory * memory_error
