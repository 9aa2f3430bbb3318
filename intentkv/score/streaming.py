"""StreamingLLM: keep the attention sinks and the newest tokens (arXiv 2309.17453)."""

import torch
from torch import Tensor

from intentkv.observe.spans import SINK_TOKENS
from intentkv.score.base import Need, ScoreInput


class StreamingScorer:
    """Score = logical position, and infinity for the first four positions, the sinks."""

    name = "streaming"
    needs: frozenset[Need] = frozenset()

    def score(self, x: ScoreInput) -> Tensor:
        """`[n]` float32 on the device of `x.slots`; exact up to position 2^24."""
        scores = x.positions.to(torch.float32)
        scores[x.positions < SINK_TOKENS] = torch.inf
        return scores.to(x.slots.device)
