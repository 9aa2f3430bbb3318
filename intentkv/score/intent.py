"""The default scorer: the dialogue, then whole sentences by the words in them that the model could not have guessed."""

import torch
from torch import Tensor

from intentkv.score.base import Need, ScoreInput, missing

TOP = 5  # words of a segment that count: a fact has a few surprising words, a long sentence many that are a little so
UNGUESSED = 6.0  # nats; a word beyond that could not be guessed, and a hash of 40 tokens no less than a number of four
LENGTH = 0.4  # at 1, worth by the token, long facts are worth nothing; at 0, worth by the segment, short ones are not


class IntentScorer:
    """Score of a token = the sum of the `TOP` largest surprises of words in its segment, over the segment's length to the `LENGTH`.

    A word's surprise is the sum of its tokens' `-log p`, at most `UNGUESSED`. Filler is predictable and facts are not; what will
    be asked is not known when an event decides, so no query can tell; half a fact is worth nothing, so all tokens of a
    segment share one score; and a segment costs what it is long. Of a segment whose beginning was dropped or is always kept,
    the candidates count.

    Before all that come the newest messages of user and assistant for which there is room (`keep.dialogue`). They are a small
    part of what an agent reads, what they say is easily guessed, and a model that no longer sees what it was asked takes
    earlier answers for the answer.

    This is ours, and reads no query memory: multiplied by any function of the published score it measured worse
    (docs/scoring.md). The published score is `intent-rule`.

    Where it loses: text full of names and numbers that nobody needs.
    """

    name = "intent"
    needs: frozenset[Need] = frozenset({"surprise", "dialogue", "words"})

    def score(self, x: ScoreInput) -> Tensor:
        """`[n]` float32 on the device of `x.slots`; infinite for the dialogue.

        Raises ValueError if the surprise, the dialogue or the words are missing.
        """
        if x.surprise is None:
            raise missing(self, "surprise")
        if x.dialogue is None:
            raise missing(self, "dialogue")
        if x.words is None:
            raise missing(self, "words")
        sums, lengths = largest_in_segments(
            word_surprise(x.surprise, x.words, UNGUESSED), x.segments.to(x.slots.device), TOP
        )
        return (sums / lengths**LENGTH).masked_fill(x.dialogue.to(sums.device), torch.inf)


def word_surprise(surprise: Tensor, words: Tensor, most: float) -> Tensor:
    """The surprise of each word at its first token, `most` at most, and 0 at its other tokens; `[n]` float32 where `surprise` is.

    Args:
        surprise: `[n]` float32 of each token. words: `[n]` int64 on the CPU, ascending.
    """
    begins = torch.ones(len(words), dtype=torch.bool)
    begins[1:] = words[1:] != words[:-1]
    first = begins.nonzero().view(-1)
    lengths = torch.diff(first, append=torch.tensor([len(words)])).to(surprise.device)
    totals = torch.zeros_like(surprise)
    totals[first.to(surprise.device)] = torch.segment_reduce(surprise, "sum", lengths=lengths, unsafe=True).clamp_(
        max=most
    )
    return totals


def largest_in_segments(values: Tensor, segments: Tensor, top: int) -> tuple[Tensor, Tensor]:
    """For each token the sum of the `top` largest values of its segment, `[n]` float32, and the segment's tokens, `[n]` int64.

    Args:
        values: `[n]` float32. segments: `[n]` int64, ascending, same device. top: at least 1.
    """
    begin = torch.searchsorted(segments, segments)  # for each token, where its segment begins
    end = torch.searchsorted(segments, segments, right=True)
    by_value = values.argsort(descending=True, stable=True)
    ranked = values[by_value[segments[by_value].argsort(stable=True)]]  # by segment, and in it the largest first
    sums = torch.zeros_like(values)
    for place in range(
        top if len(values) else 0
    ):  # a loop, as adding by index has no fixed order on a GPU, and ranks must agree
        at = begin + place
        sums += torch.where(at < end, ranked[at.clamp(max=len(values) - 1)], 0.0)
    return sums, end - begin
