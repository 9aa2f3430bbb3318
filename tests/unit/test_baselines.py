"""The scorers that look at no key, and the registry of all."""

import pytest
import torch

from intentkv.config import Settings
from intentkv.score.base import ScoreInput
from intentkv.score.random import RandomScorer
from intentkv.score.registry import SCORERS, make_scorer
from intentkv.score.streaming import StreamingScorer


def positions_only(positions: torch.Tensor, seed: int = 0) -> ScoreInput:
    return ScoreInput(
        layer_keys=lambda layer: torch.randn(64, 1, 4),
        slots=torch.randint(64, positions.shape),
        positions=positions,
        memory=torch.ones(1, 1, 4),
        query=torch.ones(1, 1, 4),
        seed=seed,
        num_layers=1,
    )


@pytest.mark.parametrize("name", sorted(SCORERS))
@pytest.mark.parametrize("n", [0, 1, 50])
def test_every_scorer_returns_one_number_a_candidate(name: str, n: int) -> None:
    scorer = make_scorer(name, Settings())
    x = positions_only(torch.arange(n))
    scores = scorer.score(x)
    assert scorer.name == name
    assert scores.shape == (n,)
    assert scores.dtype == torch.float32
    assert not scores.isnan().any()
    assert torch.equal(x.positions, torch.arange(n))


def test_an_unknown_scorer_lists_the_known() -> None:
    with pytest.raises(
        ValueError, match="expected one of intent, intent-rule, intent-head, streaming, random, got 'h3o'"
    ):
        make_scorer("h3o", Settings())


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
