"""ActKV: keep what the session's actions have been reading (LRFU over recovered attention)."""

import torch
from torch import Tensor

from intentkv.score.base import Need, ScoreInput, missing


class ActKVScorer:
    """Score = the session's LRFU keep score (`score.lrfu`); 0 for what no action has read yet.

    Nothing is computed here: regions, recovered attention and keep scores were gathered while the answers were
    generated, on the host. Equal scores, zeros among them, leave the choice to the budget, which keeps the later one.
    """

    name = "actkv"
    needs: frozenset[Need] = frozenset({"keep_scores"})

    def score(self, x: ScoreInput) -> Tensor:
        """`[n]` float32 on the device of `x.slots`. Raises ValueError without the keep scores."""
        if x.keep_scores is None:
            raise missing(self, "keep_scores")
        return x.keep_scores.to(x.slots.device, torch.float32)
