"""KeyDiff: keys that differ most from all others (arXiv 2504.15364)."""

import torch
from torch import Tensor
from torch.nn import functional

from intentkv.kernels.chunks import chunks
from intentkv.score.base import Need, ScoreInput


class KeyDiffScorer:
    """`score_j = - mean over l, h of cos(k_j, anchor)`, the anchor being the mean of the keys after each is scaled to norm 1.

    The original ranks for every KV head of every layer by itself; one slot map ranks by the mean over them. Its anchor
    is the mean of the whole cache, here of the candidates: what is always kept has no part in it.

    Cost: all keys of the candidates, read twice.
    """

    name = "keydiff"
    needs: frozenset[Need] = frozenset()

    def score(self, x: ScoreInput) -> Tensor:
        """`[n]` float32 in [-1, 1] on the device of `x.slots`; 0 for a key or an anchor that is zero."""
        total = torch.zeros(x.slots.shape, dtype=torch.float32, device=x.slots.device)
        if not len(total):
            return total
        heads = 0
        for layer in range(x.num_layers):
            keys = x.layer_keys(layer)
            heads += keys.shape[1]
            parts = list(chunks(len(total), 4 * 3 * keys[0].numel()))
            direction = torch.zeros(keys.shape[1:], dtype=torch.float32, device=keys.device)
            for chunk in parts:
                direction += _unit(keys, x.slots[chunk]).sum(0)
            anchor = functional.normalize(direction, dim=-1)  # the cosine does not see the anchor's length
            for chunk in parts:
                total[chunk] -= (_unit(keys, x.slots[chunk]) * anchor).sum(dim=(1, 2))
        return x.ranks.mean(total / max(heads, 1))


def _unit(keys: Tensor, slots: Tensor) -> Tensor:
    """The keys of `slots` `[c]`, each scaled to norm 1: `[c, H_kv, D]` float32."""
    return functional.normalize(keys.index_select(0, slots).to(torch.float32), dim=-1)
