"""SnapKV: what the last queries of the prompt attend to (arXiv 2404.14469)."""

import torch
from torch import Tensor
from torch.nn import functional

from intentkv.kernels.attention_shares import attention_shares
from intentkv.score.base import Need, ScoreInput, missing

KERNEL = 5  # positions averaged over; like the window of 32 rows, the default of the authors' code


class SnapKVScorer:
    """`score_j = mean over |i - j| <= 2 of the sum over l, h and the window's rows t of softmax_i(q_t . k_i / sqrt(D))`.

    Softmax over all that a row sees, forced positions and the window itself included; neighbours are those of the live
    history in front of the window, and beyond its ends count as 0. The window itself is never dropped.

    The original ranks for every query head of every layer by itself and keeps other tokens in each; one slot map for all
    can only keep what the heads together vote for. It compresses once, when the prompt has been prefilled, and keeps all that
    is generated afterwards; here later events of a session rank what is left with that turn's window, and an event during
    a generation with the newest generated rows.

    Cost: the attention of 32 rows over all live keys, keys read twice.
    """

    name = "snapkv"
    needs: frozenset[Need] = frozenset({"window"})

    def score(self, x: ScoreInput) -> Tensor:
        """`[n]` float32 on the device of `x.slots`. Raises ValueError without a window."""
        window = x.window
        if window is None:
            raise missing(self, "window")
        votes = torch.zeros(window.before, dtype=torch.float32, device=x.slots.device)
        if not len(x.slots) or not len(votes):
            return window.at(x.positions, votes)
        for layer in range(x.num_layers):
            queries, keys = window.queries[layer], x.layer_keys(layer)
            for _, chunk, shares in attention_shares(queries, keys, window.slots, window.visible, window.scale):
                part = votes[chunk]  # shorter than the chunk where the window begins
                part += shares[:, : len(part)].sum(dim=(0, 2, 3))
        # The mean is linear, so it may come after the sum over heads.
        pooled = functional.avg_pool1d(x.ranks.sum(votes)[None], KERNEL, stride=1, padding=KERNEL // 2)[0]
        return window.at(x.positions, pooled)
