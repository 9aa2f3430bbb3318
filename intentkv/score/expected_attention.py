"""Expected Attention: what queries drawn from the recent ones' distribution would attend to (arXiv 2510.00636)."""

import math

import torch
from torch import Tensor
from torch.nn import functional

from intentkv.kernels.chunks import chunks
from intentkv.score.base import Need, ScoreInput, missing


class ExpectedAttentionScorer:
    """`z_(h,j) = mu_h . k_j / sqrt(D) + k_j^T Sigma_h k_j / (2 D)`: the log of E[exp(q . k_j / sqrt(D))], q ~ N(mu, Sigma).

    For each KV head, `score_j` is `softmax_j(z_(h,j))`, averaged over its query heads, times |v_j|, and then scaled so that
    the head's scores sum to 1; these are summed over layers and KV heads.

    A simplification: the original takes mu and Sigma of the queries before their rotation, over the whole prompt, and
    turns both by the mean rotation of the next 512 positions. Rotated queries are what passes by here, so mu and Sigma
    are those of the turn's query span as rotated: they stand for queries at the positions of the span, not of what
    follows it, and Sigma contains how the rotation differs within the span. For a short span right at the end of the
    context the difference is small against the distance to the history; for a span of thousands of tokens it is not.

    The original ranks for every KV head of every layer by itself, where a head's overall scale is of no account; the scaling to
    1 makes it so for the sum, in which one layer with large values would otherwise outvote the rest.

    Cost: n * H_q * D^2 a layer, and a covariance of L * H_q * D^2 floats a request (75 MB for 36 layers of 32 heads with
    D = 128). The workspace of one layer grows with n, by 4 * H_q bytes a candidate.
    """

    name = "expected-attention"
    needs: frozenset[Need] = frozenset({"query", "covariance", "values"})

    def score(self, x: ScoreInput) -> Tensor:
        """`[n]` float32 on the device of `x.slots`; sums to L * H_kv. Raises ValueError without query, covariance or values."""
        if x.query is None:
            raise missing(self, "query")
        if x.covariance is None:
            raise missing(self, "covariance")
        if x.layer_values is None:
            raise missing(self, "values")
        total = torch.zeros(x.slots.shape, dtype=torch.float32, device=x.slots.device)
        if not len(total):
            return total
        for layer in range(x.num_layers):
            keys, values = x.layer_keys(layer), x.layer_values(layer)
            shares = _logits(x.query[layer], x.covariance[layer], keys, x.slots).softmax(0)
            weights = shares.view(len(total), keys.shape[1], -1).mean(2) * _norms(values, x.slots)
            total += functional.normalize(weights, p=1, dim=0).sum(1)
        return x.ranks.sum(total)


def _logits(mean: Tensor, covariance: Tensor, keys: Tensor, slots: Tensor) -> Tensor:
    """`[n, H_q]` float32 from mean `[H_q, D]`, covariance `[H_q, D, D]`, and the paged keys of `slots` `[n]`."""
    heads, dim = mean.shape
    kv_heads = keys.shape[1]
    grouped = mean.view(kv_heads, -1, dim).transpose(1, 2) / math.sqrt(dim)  # [H_kv, D, G]
    spread = covariance.view(kv_heads, -1, dim, dim).transpose(1, 2).flatten(2) / (2 * dim)  # [H_kv, D, G * D]
    logits = torch.empty(len(slots), heads, dtype=torch.float32, device=keys.device)
    for chunk in chunks(len(slots), 4 * (3 * kv_heads + 2 * heads) * dim):
        near = keys.index_select(0, slots[chunk]).to(torch.float32).transpose(0, 1)  # [H_kv, c, D]
        turned = torch.bmm(near, spread).view(*near.shape[:2], -1, dim)
        sums = torch.bmm(near, grouped) + (turned * near.unsqueeze(2)).sum(3)
        logits[chunk] = sums.transpose(0, 1).flatten(1)
    return logits


def _norms(values: Tensor, slots: Tensor) -> Tensor:
    """`[n, H_kv]` float32, lengths of the paged values of `slots` `[n]`."""
    parts = chunks(len(slots), 4 * 2 * values[0].numel())
    return torch.cat([values.index_select(0, slots[part]).to(torch.float32).norm(dim=-1) for part in parts])
