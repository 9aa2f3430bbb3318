"""Random scores by the sentence: what keeping text in whole pieces brings by itself."""

from torch import Tensor

from intentkv.score.base import Need, ScoreInput
from intentkv.score.random import draw


class RandomSentenceScorer:
    """A score in [0, 1) that depends on the seed and the number of the sentence only.

    Equal on all ranks and on every turn, as `random` is. All of a sentence stays or goes, but for the one at the budget's edge,
    which loses its beginning.
    """

    name = "random-sentence"
    needs: frozenset[Need] = frozenset()

    def score(self, x: ScoreInput) -> Tensor:
        """`[n]` float32 on the device of `x.slots`."""
        return draw(x.seed, x.segments).to(x.slots.device)
