"""Surprise by segment: whole sentences, ranked by how much they told the model that it could not have guessed."""

import torch
from torch import Tensor

from intentkv.score.base import Need, ScoreInput, missing

TOP = 6  # tokens of a segment that count: a fact has a few surprising tokens, a long sentence many that are a little so


class SurpriseScorer:
    """Score of a token = the sum of the `TOP` largest surprises `-log p` in its segment.

    Filler is predictable and facts are not; what will be asked is not known when an event decides, so no query can tell; and
    half a fact is worth nothing, so all tokens of a segment share one score. Of a segment whose beginning was dropped or is
    always kept, the candidates count.

    Where it loses: text full of surprising tokens that nobody needs, such as hashes, base64 or stack traces.
    """

    name = "surprise"
    needs: frozenset[Need] = frozenset({"surprise"})

    def score(self, x: ScoreInput) -> Tensor:
        """`[n]` float32 on the device of `x.slots`, in nats. Raises ValueError if the surprise was not observed."""
        if x.surprise is None:
            raise missing(self, "surprise")
        return segment_sums(x.surprise, x.segments.to(x.slots.device), TOP)


def segment_sums(values: Tensor, segments: Tensor, top: int) -> Tensor:
    """For each token the sum of the `top` largest values of its segment, `[n]` float32.

    Args:
        values: `[n]` float32. segments: `[n]` int64, ascending, same device. top: at least 1.
    """
    if not values.numel():
        return values
    begin = torch.searchsorted(segments, segments)  # for each token, where its segment begins
    end = torch.searchsorted(segments, segments, right=True)
    by_value = values.argsort(descending=True, stable=True)
    ranked = values[by_value[segments[by_value].argsort(stable=True)]]  # by segment, and in it the largest first
    sums = torch.zeros_like(values)
    for place in range(top):  # a loop, since adding by index has no fixed order on a GPU, and ranks must agree
        at = begin + place
        sums += torch.where(at < end, ranked[at.clamp(max=len(values) - 1)], 0.0)
    return sums
