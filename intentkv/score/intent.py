"""The default scorer: the dialogue, then whole sentences by the words in them that the model could not have guessed."""

import torch
from torch import Tensor

from intentkv.score.base import Need, ScoreInput, missing

TOP = 5  # words of a segment that count: a fact has a few surprising words, a long sentence many that are a little so
UNGUESSED = 6.0  # nats; a word beyond that could not be guessed, and a hash of 40 tokens no less than a number of four
LEAST, STEEPNESS = 0.4, 1.5  # of the part of the room that goes by the token, see `part_by_token`


class IntentScorer:
    """Worth of a segment = the sum of the `TOP` largest surprises of words in it; kept is what is worth most by the segment or by the token.

    A word's surprise is the sum of its tokens' `-log p`, at most `UNGUESSED`. Filler is predictable and facts are not; what will
    be asked is not known when an event decides, so no query can tell; half a fact is worth nothing, so all tokens of a
    segment share one score. Of a segment whose beginning was dropped or is always kept, the candidates count.

    A segment costs what it is long. By the token, short facts come first and long ones never; by the segment it is the other way
    round; and which a text has is not known. So the room is divided between the two orders (`part_by_token`): the score is
    minus the room at which a token is kept by one of them.

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
        segments, dialogue = x.segments.to(x.slots.device), x.dialogue.to(x.slots.device)
        worth, lengths = largest_in_segments(word_surprise(x.surprise, x.words, UNGUESSED), segments, TOP)
        part = part_by_token(x.share)
        by_token = room_needed(worth / lengths, segments, dialogue) / part
        by_segment = room_needed(worth, segments, dialogue) / (1 - part)
        return (-torch.minimum(by_token, by_segment)).masked_fill(dialogue, torch.inf)


def part_by_token(share: float) -> float:
    """How much of the room goes to what is worth most by the token, rather than by the segment.

    With half of the history kept 0.4, with an eighth 0.8: the tighter it is, the more must each token bring.

    Args:
        share: of the history that the budget keeps, in (0, 1].
    """
    return max(LEAST, 1 - STEEPNESS * share)


def room_needed(worth: Tensor, segments: Tensor, dialogue: Tensor) -> Tensor:
    """For each token the room, in tokens beside the dialogue, in which its segment fits if the most worth comes first: `[n]` int64.

    Of equal worth the later segment comes first.

    Args:
        worth: `[n]` float32, equal within a segment. segments: `[n]` int64, ascending. dialogue: `[n]` bool. On one device.
    """
    best_first = worth.argsort(stable=True).flip(0)
    room = torch.empty_like(segments)
    room[best_first] = (~dialogue)[best_first].cumsum(0)
    return room[torch.searchsorted(segments, segments)]  # that of a segment's first token, which comes last of it


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
