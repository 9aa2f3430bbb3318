"""Ranks that share the heads, or the vocabulary, get together what one rank gets alone."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from intentkv.config import Settings
from intentkv.kernels import surprise
from intentkv.kernels.surprise import shard_logits, surprise_of, token_surprise
from intentkv.score.base import ScoreInput, Scorer
from intentkv.score.head.model import ResidualHead
from intentkv.score.intent_head import IntentHeadScorer
from intentkv.score.ranks import Ranks
from intentkv.score.registry import HEAD_SCORER, SCORERS, WHOLE_GROUPS, make_scorer
from tests.unit.test_published_scorers import DIM, KV_HEADS, LAYERS, make_case

GROUP = 4


class Group:
    """Ranks that are threads: each waits until all have put down their part."""

    def __init__(self, size: int) -> None:
        self.parts: list[Tensor] = [torch.empty(0)] * size
        self.barrier = threading.Barrier(size, timeout=60)

    def exchange(self, rank: int, part: Tensor) -> list[Tensor]:
        self.parts[rank] = part.clone()
        self.barrier.wait()
        parts = list(self.parts)
        self.barrier.wait()
        return parts


class Threads(Ranks):
    def __init__(self, group: Group, rank: int) -> None:
        self.size, self.rank, self._group = len(group.parts), rank, group

    def sum(self, part: Tensor) -> Tensor:
        return torch.stack(self._group.exchange(self.rank, part)).sum(0)

    def first(self, own: Tensor) -> Tensor:
        return self._group.exchange(self.rank, own)[0]


def on_ranks(size: int, work: Callable[[Ranks], Tensor]) -> list[Tensor]:
    group = Group(size)
    with ThreadPoolExecutor(size) as pool:
        return list(pool.map(lambda rank: work(Threads(group, rank)), range(size)))


def shard(x: ScoreInput, ranks: Ranks) -> ScoreInput:
    """The heads of one rank, as SGLang deals them out: query heads in parts, KV heads in parts or one of them to several."""
    heads = KV_HEADS * GROUP // ranks.size
    own = slice(ranks.rank * heads, (ranks.rank + 1) * heads)
    kv = slice(own.start // GROUP, max(own.stop // GROUP, own.start // GROUP + 1))
    assert x.memory is not None and x.query is not None and x.covariance is not None
    assert x.window is not None and x.layer_values is not None and x.attention is not None
    keys, values = x.layer_keys, x.layer_values
    return replace(
        x,
        layer_keys=lambda layer: keys(layer)[:, kv],
        layer_values=lambda layer: values(layer)[:, kv],
        memory=x.memory[:, own],
        query=x.query[:, own],
        covariance=x.covariance[:, own],
        window=replace(x.window, queries=x.window.queries[:, :, own]),
        attention=x.attention * (ranks.rank + 1) / sum(range(1, ranks.size + 1)),  # what the rank's heads have paid
        ranks=ranks,
    )


def whole() -> ScoreInput:
    x = make_case(length=200, rows=9, group=GROUP, candidates=range(4, 180)).x
    generator = torch.Generator().manual_seed(3)
    n = len(x.slots)
    return replace(
        x,
        memory=torch.nn.functional.normalize(torch.randn(LAYERS, KV_HEADS * GROUP, DIM, generator=generator), dim=-1),
        query_slots=x.slots[-7:],
        surprise=torch.rand(n, generator=generator),
        attention=torch.rand(n, generator=generator),
        keep_scores=torch.rand(n, generator=generator),
        dialogue=torch.rand(n, generator=generator) < 0.1,
        words=torch.arange(n) // 2,
    )


def scorer_of(name: str) -> Scorer:
    if name != HEAD_SCORER:
        return make_scorer(name, Settings())
    torch.manual_seed(5)
    head = ResidualHead(DIM)
    torch.nn.init.normal_(head.output.weight)  # an untrained one says nothing
    return IntentHeadScorer(head)


@pytest.mark.parametrize(
    ("name", "size"), [(name, size) for name in SCORERS for size in (2, 4, 8) if name not in WHOLE_GROUPS or size == 2]
)
def test_tp_ranks_score_as_one(name: str, size: int) -> None:
    """Within the rounding of sums in another order, and to the bit the same on every rank. 4 and 8 ranks share 2 KV heads."""
    x, scorer = whole(), scorer_of(name)
    alone = scorer.score(x)
    scores = on_ranks(size, lambda ranks: scorer.score(shard(x, ranks)))
    assert all(torch.equal(other, scores[0]) for other in scores)
    torch.testing.assert_close(scores[0], alone, rtol=2e-5, atol=2e-6)
    assert len(alone.unique()) > 5, "and it said something"


@pytest.mark.parametrize("name", sorted(WHOLE_GROUPS - {"actkv"}))
def test_tp_ranks_of_one_kv_head_could_not_add_up_a_whole_group(name: str) -> None:
    """What is refused is refused for a reason."""
    x, scorer = whole(), scorer_of(name)
    alone = scorer.score(x)
    scores = on_ranks(4, lambda ranks: scorer.score(shard(x, ranks)))
    live = alone.isfinite()
    assert (scores[0] / scores[0][live].sum() - alone / alone[live].sum())[live].abs().max() > 1e-4


@pytest.mark.parametrize("size", [2, 3])
def test_tp_ranks_share_the_vocabulary(size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The frequent tokens may lie on one rank, on several, or end within one."""
    draw = torch.Generator().manual_seed(7)
    hidden, head = torch.randn(50, 24, generator=draw), torch.randn(90, 24, generator=draw)
    targets = torch.randint(90, (50,), generator=draw)
    for frequent in (10, 45, 70, 200):
        monkeypatch.setattr(surprise, "FREQUENT", frequent)
        width = 90 // size
        mass, own = zip(
            *(shard_logits(hidden, targets, head[r * width : (r + 1) * width], 0.7, r * width) for r in range(size)),
            strict=True,
        )
        together = surprise_of(torch.stack(mass).logsumexp(0), torch.stack(own).sum(0), targets)
        torch.testing.assert_close(together, token_surprise(hidden, targets, head, 0.7), rtol=1e-5, atol=1e-5)
    nothing, none = shard_logits(hidden, targets, head[:0], 1.0, 90)
    assert (nothing == -torch.inf).all() and (none == 0).all(), "a rank may have no token of its own"
