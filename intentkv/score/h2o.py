"""H2O: heavy hitters, the tokens that have received most attention so far (arXiv 2306.14048)."""

from torch import Tensor

from intentkv.score.base import Need, ScoreInput, missing


class H2OScorer:
    """`score_j = sum over l, h and all queries i >= j so far of softmax_j(q_i . k_j / sqrt(D))`.

    The original keeps this sum for every head of every layer, and drops one token a head at every step of a generation; half
    of its budget are heavy hitters, half the newest tokens. Here one sum over all heads ranks the tokens, at events, and
    the newest tokens are those that are always kept, however many that is. A sum favours what has been there for long;
    that is the original's, too.

    Cost: the sum is taken during every forward of the request, prefill and decode: about a second attention over the same
    keys, in float32 and read twice. It is the most expensive scorer here, and there for comparison only. Scoring itself
    is free.
    """

    name = "h2o"
    needs: frozenset[Need] = frozenset({"attention"})

    def score(self, x: ScoreInput) -> Tensor:
        """`[n]` float32 on the device of `x.slots`. Raises ValueError without the attention received."""
        if x.attention is None:
            raise missing(self, "attention")
        return x.ranks.sum(x.attention.clone())
