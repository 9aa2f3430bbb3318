"""The default scorer: the dialogue, then whole sentences by what they told the model that it could not have guessed, per token."""

import torch
from torch import Tensor

from intentkv.score.base import Need, ScoreInput, missing

TOP = 4  # tokens of a segment that count: a fact has a few surprising tokens, a long sentence many that are a little so


class IntentScorer:
    """Score of a token = the sum of the `TOP` largest surprises `-log p` in its segment, over the segment's length.

    Filler is predictable and facts are not; what will be asked is not known when an event decides, so no query can tell; half a
    fact is worth nothing, so all tokens of a segment share one score; and a segment costs what it is long, so, as for any
    knapsack, what counts is its worth by the token. Of a segment whose beginning was dropped or is always kept, the candidates
    count.

    Before all that come the newest messages of user and assistant for which there is room (`keep.dialogue`). They are a small
    part of what an agent reads, what they say is easily guessed, and a model that no longer sees what it was asked takes
    earlier answers for the answer.

    This is ours, and reads no query memory: multiplied by any function of the published score it measured worse
    (docs/scoring.md). The published score is `intent-rule`.

    Where it loses: text full of surprising tokens that nobody needs, such as hashes, base64 or stack traces.
    """

    name = "intent"
    needs: frozenset[Need] = frozenset({"surprise", "dialogue"})

    def score(self, x: ScoreInput) -> Tensor:
        """`[n]` float32 on the device of `x.slots`, in nats a token; infinite for the dialogue.

        Raises ValueError if the surprise or the dialogue is missing.
        """
        if x.surprise is None:
            raise missing(self, "surprise")
        if x.dialogue is None:
            raise missing(self, "dialogue")
        worth = segment_worth(x.surprise, x.segments.to(x.slots.device), TOP)
        return worth.masked_fill(x.dialogue.to(worth.device), torch.inf)


def segment_worth(values: Tensor, segments: Tensor, top: int) -> Tensor:
    """For each token the sum of the `top` largest values of its segment over the segment's tokens, `[n]` float32.

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
    return sums / (end - begin)
