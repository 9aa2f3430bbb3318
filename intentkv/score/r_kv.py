"""R-KV: important and not redundant (arXiv 2505.24133)."""

import torch
from torch import Tensor
from torch.nn import functional

from intentkv.kernels.attention_shares import attention_shares
from intentkv.kernels.chunks import chunks
from intentkv.score.base import Need, ScoreInput, Window, missing

ROWS = 8  # observed queries
KERNEL = 7  # positions of the max pooling
SIMILAR = 0.5  # cosine from which a key counts as a repetition
IMPORTANCE = 0.1  # lambda of the paper


class RKVScorer:
    """`score_j = sum over l, h of (lambda I_(l,h,j) - (1 - lambda) R_(l,h,j))`, over KV heads h, lambda = 0.1.

    Importance I: the logits of the last 8 queries, the largest of each group of query heads, a softmax over what precedes the
    window, the mean over the queries, and the maximum over 7 neighbours. Redundancy R: `C_ij = cos(k_i, k_j)` with
    `C_ii = 0`; of the keys that are similar to k_i (C > 0.5) the newest is spared, so that the newest of several
    repetitions stays: its C_ij is 0; then `R = softmax_j(mean over i of C_ij)`. Both run over all live positions in
    front of the window, forced ones included.

    The original ranks for every KV head of every layer by itself, each time 128 tokens have been generated, on a cache of
    budget + 128 tokens. One slot map ranks by the sum over heads, and the history of an agent is the prompt, not the
    generation, so it is long when it is first ranked.

    Cost: m^2 * H_kv * D a layer for m live positions, and 4 * m * H_kv * D bytes of workspace. Meant for comparison, at a
    few thousand tokens.
    """

    name = "r-kv"
    needs: frozenset[Need] = frozenset({"window"})

    def score(self, x: ScoreInput) -> Tensor:
        """`[n]` float32 on the device of `x.slots`. Raises ValueError without a window."""
        window = x.window
        if window is None:
            raise missing(self, "window")
        total = torch.zeros(window.before, dtype=torch.float32, device=x.slots.device)
        if len(x.slots) and len(total):
            slots = window.slots[: len(total)]
            for layer in range(x.num_layers):
                keys = x.layer_keys(layer)
                importance = _importance(window, window.queries[layer, -ROWS:], keys, slots)
                total += (IMPORTANCE * importance - (1 - IMPORTANCE) * _redundancy(keys, slots)).sum(0)
            total = x.ranks.sum(total)
        return window.at(x.positions, total)


def _importance(window: Window, queries: Tensor, keys: Tensor, slots: Tensor) -> Tensor:
    """`[H_kv, m]` float32 from some queries `[t, H_q, D]` that all see the keys of `slots` `[m]`."""
    mean = torch.zeros(keys.shape[1], len(slots), dtype=torch.float32, device=keys.device)
    everything = torch.full((len(queries),), len(slots))
    for _, chunk, shares in attention_shares(queries, keys, slots, everything, window.scale, group="max"):
        mean[:, chunk] += shares[:, :, 0].sum(2) / len(queries)
    return functional.max_pool1d(mean, KERNEL, stride=1, padding=KERNEL // 2)


def _redundancy(keys: Tensor, slots: Tensor) -> Tensor:
    """`[H_kv, m]` float32 from all pairs of the keys of `slots` `[m]`."""
    unit = functional.normalize(keys.index_select(0, slots).to(torch.float32), dim=-1).transpose(0, 1)
    kv_heads, m, _ = unit.shape
    index = torch.arange(m, device=keys.device)
    sums = torch.zeros(kv_heads, m, dtype=torch.float32, device=keys.device)
    for rows in chunks(m, 4 * 4 * kv_heads * m):  # the pairs, and as much again to find the newest
        cosines = unit[:, rows] @ unit.transpose(1, 2)
        cosines.masked_fill_(index[rows, None] == index, 0.0)
        newest = torch.where(cosines > SIMILAR, index, -1).amax(2, keepdim=True)
        cosines.masked_fill_(index == newest, 0.0)
        sums += cosines.sum(1)
    return (sums / m).softmax(1)
