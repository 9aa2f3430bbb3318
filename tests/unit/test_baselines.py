"""The scorers that look at no key, and the registry of all."""

import dataclasses
from pathlib import Path

import pytest
import torch

from intentkv.config import Settings
from intentkv.score.actkv import ActKVScorer
from intentkv.score.base import ScoreInput, Window
from intentkv.score.h2o import H2OScorer
from intentkv.score.random import RandomScorer
from intentkv.score.random_sentence import RandomSentenceScorer
from intentkv.score.registry import SCORERS, make_scorer
from intentkv.score.streaming import StreamingScorer
from tests.unit.heads import untrained_head


def positions_only(positions: torch.Tensor, seed: int = 0) -> ScoreInput:
    """What every scorer can rank: random keys and values of one layer and head, and all that a scorer may need."""
    n = len(positions)
    slots = torch.randint(64, (n,))
    end = int(positions[-1]) + 1 if n else 0
    return ScoreInput(
        layer_keys=lambda layer: torch.randn(64, 1, 4),
        slots=slots,
        positions=positions,
        memory=torch.ones(1, 1, 4),
        query=torch.ones(1, 1, 4),
        seed=seed,
        num_layers=1,
        share=0.25,
        segments=positions // 7,
        surprise=torch.rand(positions.shape),
        window=Window(
            queries=torch.randn(1, 3, 1, 4),
            start=end,
            slots=torch.cat((slots, torch.arange(3))),
            positions=torch.cat((positions, torch.arange(end, end + 3))),
            scale=0.5,
        ),
        attention=torch.rand(n),
        covariance=torch.eye(4).view(1, 1, 4, 4),
        layer_values=lambda layer: torch.randn(64, 1, 4),
        keep_scores=torch.rand(positions.shape),
        dialogue=positions % 9 == 0,
        words=positions // 2,
    )


@pytest.mark.parametrize("name", sorted(SCORERS))
@pytest.mark.parametrize("n", [0, 1, 50])
def test_every_scorer_returns_one_number_a_candidate(name: str, n: int, tmp_path: Path) -> None:
    scorer = make_scorer(name, Settings(head=untrained_head(tmp_path, 4)))
    x = positions_only(torch.arange(n))
    scores = scorer.score(x)
    assert scorer.name == name
    assert scores.shape == (n,)
    assert scores.dtype == torch.float32
    assert not scores.isnan().any()
    assert torch.equal(x.positions, torch.arange(n))


def test_an_unknown_scorer_lists_the_known() -> None:
    with pytest.raises(ValueError, match=f"expected one of {', '.join(SCORERS)}, got 'h3o'"):
        make_scorer("h3o", Settings())


@pytest.mark.parametrize("name", sorted(SCORERS))
def test_a_scorer_says_what_it_was_not_given(name: str, tmp_path: Path) -> None:
    """Whatever a scorer declares, and nothing else, it asks for in words when it is missing."""
    scorer = make_scorer(name, Settings(head=untrained_head(tmp_path, 4)))
    fields = {
        "query": ("query", "memory"),
        "surprise": ("surprise",),
        "dialogue": ("dialogue",),
        "words": ("words",),
        "window": ("window",),
        "attention": ("attention",),
        "covariance": ("covariance",),
        "values": ("layer_values",),
        "keep_scores": ("keep_scores",),
    }
    x = positions_only(torch.arange(20))
    for need, given in fields.items():
        without = dataclasses.replace(x, **dict.fromkeys(given))
        if need in scorer.needs:
            with pytest.raises(ValueError, match=f"{name}: expected '{need}' in its input"):
                scorer.score(without)
        else:
            assert len(scorer.score(without)) == 20


def test_actkv_is_the_keep_scores() -> None:
    x = positions_only(torch.arange(9))
    assert x.keep_scores is not None
    assert torch.equal(ActKVScorer().score(x), x.keep_scores)


def test_streaming_keeps_sinks_then_the_newest() -> None:
    scores = StreamingScorer().score(positions_only(torch.tensor([0, 3, 4, 90, 1000])))
    assert scores.argsort(descending=True, stable=True).tolist() == [0, 1, 4, 3, 2]


def test_random_depends_on_seed_and_position_only() -> None:
    one = RandomScorer().score(positions_only(torch.arange(1000), seed=5))
    survivors = torch.arange(0, 1000, 7)
    assert torch.equal(RandomScorer().score(positions_only(survivors, seed=5)), one[survivors])
    assert not torch.equal(RandomScorer().score(positions_only(torch.arange(1000), seed=6)), one)


@pytest.mark.parametrize("seed", [0, 1, -1, 2**63, 2**70])
def test_random_is_uniform_for_any_seed(seed: int) -> None:
    scores = RandomScorer().score(positions_only(torch.arange(20_000), seed=seed))
    assert scores.min() >= 0
    assert scores.max() < 1
    counts = torch.histc(scores, bins=10, min=0, max=1)
    assert (counts - 2000).abs().max() < 200  # 4.7 standard deviations
    assert len(scores.unique()) > 19_900


def test_neighbouring_seeds_are_not_shifts_of_each_other() -> None:
    one, two = (RandomScorer().score(positions_only(torch.arange(1000), seed=s)) for s in (10, 11))
    for shift in range(4):
        assert (one[shift:] == two[: 1000 - shift]).sum() < 5


def test_random_sentences_stay_or_go_as_a_whole() -> None:
    """One draw a sentence, the same whatever else is left of it, and as uniform as the draws of tokens."""
    x = positions_only(torch.arange(7000), seed=3)
    scores = RandomSentenceScorer().score(x)
    assert torch.equal(scores.view(1000, 7), scores[::7, None].expand(1000, 7))
    assert torch.equal(scores[::7], RandomScorer().score(positions_only(torch.arange(1000), seed=3)))
    survivors = torch.arange(0, 7000, 3)
    assert torch.equal(RandomSentenceScorer().score(positions_only(survivors, seed=3)), scores[survivors])


def test_attention_received_is_h2os_score() -> None:
    x = positions_only(torch.arange(9))
    scores = H2OScorer().score(x)
    assert x.attention is not None
    assert torch.equal(scores, x.attention)
    assert scores.data_ptr() != x.attention.data_ptr()
