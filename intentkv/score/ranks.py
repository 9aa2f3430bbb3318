"""The ranks that share one model under tensor parallelism, as far as a scorer needs to know of them.

Each rank has some of the heads and all of the tokens. What a scorer sums over heads is its rank's part until `sum` has
added the parts up; what every rank has in full, such as the surprise of the tokens, needs nothing of this.
"""

from torch import Tensor


class Ranks:
    """A rank that is alone; `engine.ranks` has the ones that are not.

    Every rank of a group must make the same calls in the same order, with tensors of one shape and dtype.

    Attributes:
        size: ranks of the group; each has one part in `size` of the query heads, and of the KV heads where these suffice.
        rank: this one's number, from 0.
    """

    size: int = 1
    rank: int = 0

    def sum(self, part: Tensor) -> Tensor:
        """The sum of all ranks' `part`, bit for bit the same on every rank. May write to `part` and return it."""
        return part

    def mean(self, part: Tensor) -> Tensor:
        """The mean of all ranks' `part`: the mean over all heads, where each part is that over a rank's."""
        return self.sum(part).div_(self.size)

    def first(self, own: Tensor) -> Tensor:
        """The first rank's `own`, on every rank. May write to `own` and return it."""
        return own


ALONE = Ranks()
