"""The published baselines against obvious loops over their formulas, in float64."""

import math
from dataclasses import dataclass, replace

import numpy as np
import pytest
import torch
from torch import Tensor

from intentkv.kernels import chunks
from intentkv.score.base import ScoreInput, Scorer, Window
from intentkv.score.expected_attention import ExpectedAttentionScorer
from intentkv.score.keydiff import KeyDiffScorer
from intentkv.score.r_kv import RKVScorer
from intentkv.score.snapkv import SnapKVScorer

LAYERS, KV_HEADS, DIM = 2, 2, 16


pytestmark = pytest.mark.usefixtures("one_thread")


@dataclass
class Case:
    """One request: its input, and the pool it reads. `pool[layer]` is keys and values `[S, H_kv, D]`."""

    x: ScoreInput
    pool: list[tuple[Tensor, Tensor]]

    def keys(self, layer: int, slots: Tensor) -> Tensor:
        return self.pool[layer][0][slots].double()


def make_case(
    length: int = 40,
    rows: int = 9,
    group: int = 3,
    holes: tuple[int, ...] = (5, 6, 20, 30),
    candidates: range = range(4, 34),
    dtype: torch.dtype = torch.float32,
    seed: int = 0,
) -> Case:
    """A request of `length` tokens with holes, its window of the last `rows` tokens, and its candidates."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator).to(dtype)

    slots = torch.randperm(2 * length, generator=generator)[:length]
    live = torch.tensor([p for p in range(length) if p not in holes])
    chosen = torch.tensor([p for p in candidates if p not in holes], dtype=torch.int64)
    pool = [(normal(2 * length, KV_HEADS, DIM) * 2, normal(2 * length, KV_HEADS, DIM)) for _ in range(LAYERS)]
    heads = KV_HEADS * group
    factor = torch.randn(LAYERS, heads, DIM, DIM, generator=generator)
    x = ScoreInput(
        layer_keys=lambda layer: pool[layer][0],
        slots=slots[chosen],
        positions=chosen,
        share=0.25,
        segments=chosen // 7,
        memory=torch.zeros(LAYERS, heads, DIM),
        query=torch.randn(LAYERS, heads, DIM, generator=generator),
        seed=0,
        num_layers=LAYERS,
        window=Window(normal(LAYERS, rows, heads, DIM), length - rows, slots[live], live, scale=0.3),
        covariance=factor @ factor.transpose(2, 3) / DIM,
        layer_values=lambda layer: pool[layer][1],
    )
    return Case(x, pool)


def snapkv_loop(case: Case) -> Tensor:
    """Each row of the window by itself; then the mean over five neighbours in front of the window."""
    window = case.x.window
    assert window is not None
    _, rows, heads, _ = window.queries.shape
    before = [i for i, p in enumerate(window.positions.tolist()) if p < window.start]
    votes = np.zeros(len(before))
    for layer in range(LAYERS):
        for t in range(rows):
            seen = [i for i, p in enumerate(window.positions.tolist()) if p <= window.start + t]
            keys = case.keys(layer, window.slots[seen])
            for h in range(heads):
                logits = window.scale * keys[:, h * KV_HEADS // heads] @ window.queries[layer, t, h].double()
                votes += logits.softmax(0)[: len(before)].numpy()
    pooled = {}
    for i in before:
        neighbours = [votes[j] for j in range(i - 2, i + 3) if 0 <= j < len(before)]
        pooled[int(window.positions[i])] = sum(neighbours) / 5
    return torch.tensor([pooled.get(p, math.inf) for p in case.x.positions.tolist()], dtype=torch.float64)


def r_kv_loop(case: Case) -> Tensor:
    window = case.x.window
    assert window is not None
    group = window.queries.shape[2] // KV_HEADS
    before = [i for i, p in enumerate(window.positions.tolist()) if p < window.start]
    m = len(before)
    total = np.zeros(m)
    for layer in range(LAYERS):
        for h in range(KV_HEADS):
            keys = case.keys(layer, window.slots[before])[:, h]
            importance = np.zeros(m)
            queries = window.queries[layer, -8:, h * group : (h + 1) * group].double()
            for grouped in queries:
                largest = [max(float(window.scale * key @ q) for q in grouped) for key in keys]
                importance += torch.tensor(largest, dtype=torch.float64).softmax(0).numpy() / len(queries)
            cosines = np.zeros((m, m))
            for i in range(m):
                for j in range(m):
                    if i != j:
                        cosines[i, j] = float(keys[i] @ keys[j] / (keys[i].norm() * keys[j].norm()))
                similar = [j for j in range(m) if cosines[i, j] > 0.5]
                if similar:
                    cosines[i, similar[-1]] = 0
            redundancy = torch.from_numpy(cosines.sum(0) / max(m, 1)).softmax(0).numpy()
            for j in range(m):
                total[j] += 0.1 * importance[max(0, j - 3) : j + 4].max() - 0.9 * redundancy[j]
    at = {int(window.positions[i]): value for i, value in zip(before, total, strict=True)}
    return torch.tensor([at.get(p, math.inf) for p in case.x.positions.tolist()], dtype=torch.float64)


def keydiff_loop(case: Case) -> Tensor:
    total = np.zeros(len(case.x.slots))
    for layer in range(LAYERS):
        for h in range(KV_HEADS):
            keys = case.keys(layer, case.x.slots)[:, h]
            anchor = (keys / keys.norm(dim=-1, keepdim=True)).mean(0)
            for j, key in enumerate(keys):
                total[j] -= float(key @ anchor / (key.norm() * anchor.norm())) / (LAYERS * KV_HEADS)
    return torch.from_numpy(total)


def expected_attention_loop(case: Case) -> Tensor:
    x = case.x
    assert x.covariance is not None
    group = x.query.shape[1] // KV_HEADS
    total = torch.zeros(len(x.slots), dtype=torch.float64)
    for layer in range(LAYERS):
        for h in range(KV_HEADS):
            keys = case.keys(layer, x.slots)[:, h]
            shares = torch.zeros(len(keys), dtype=torch.float64)
            for g in range(h * group, (h + 1) * group):
                mean, covariance = x.query[layer, g].double(), x.covariance[layer, g].double()
                z = [float(mean @ k / math.sqrt(DIM) + k @ covariance @ k / (2 * DIM)) for k in keys]
                shares += torch.tensor(z, dtype=torch.float64).softmax(0) / group
            weighted = shares * case.pool[layer][1][x.slots, h].double().norm(dim=-1)
            total += weighted / weighted.sum()
    return total


LOOPS = {
    SnapKVScorer: snapkv_loop,
    RKVScorer: r_kv_loop,
    KeyDiffScorer: keydiff_loop,
    ExpectedAttentionScorer: expected_attention_loop,
}
every_scorer = pytest.mark.parametrize("scorer", LOOPS, ids=lambda scorer: scorer.name)


def check(scorer: Scorer, case: Case) -> None:
    scores = scorer.score(case.x)
    assert scores.dtype == torch.float32
    torch.testing.assert_close(scores.double(), LOOPS[type(scorer)](case), rtol=1e-5, atol=2e-6)


@every_scorer
@pytest.mark.parametrize("group", [1, 3, 4])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_equals_the_loop(scorer: type[Scorer], group: int, dtype: torch.dtype) -> None:
    for seed in range(3):
        check(scorer(), make_case(group=group, dtype=dtype, seed=seed))


@every_scorer
@pytest.mark.parametrize("workspace", [1, 10_000, 60_000])
def test_chunks_change_nothing(monkeypatch: pytest.MonkeyPatch, scorer: type[Scorer], workspace: int) -> None:
    case = make_case()
    monkeypatch.setattr(chunks, "WORKSPACE_BYTES", workspace)
    check(scorer(), case)


@every_scorer
@pytest.mark.parametrize(
    "shape",
    [
        {"candidates": range(0)},
        {"candidates": range(4, 5)},
        {"candidates": range(40)},
        {"rows": 1},
        {"rows": 40, "holes": ()},
        {"length": 3, "rows": 1, "holes": (), "candidates": range(2)},
        {"holes": (0, 1, 2, 3, 4, 29, 30, 32)},
    ],
    ids=["none", "one", "all", "one row", "only the window", "short", "holes at the edges"],
)
def test_edges(scorer: type[Scorer], shape: dict[str, object]) -> None:
    """No candidates, one, some in the window, a window of one row, of everything, and one with a hole in it."""
    check(scorer(), make_case(**shape))  # type: ignore[arg-type]


@every_scorer
def test_inputs_are_left_alone(scorer: type[Scorer]) -> None:
    case = make_case(dtype=torch.bfloat16)
    window = case.x.window
    assert window is not None
    tensors = [case.x.slots, case.x.query, case.x.covariance, window.queries, window.slots, *sum(case.pool, ())]
    before = [t.clone() for t in tensors]
    scorer().score(case.x)
    assert all(torch.equal(a, b) for a, b in zip(before, tensors, strict=True))


def test_snapkv_neighbours_vote_alike() -> None:
    """A key that takes all the attention lifts two live neighbours on each side, over holes too, all by the same."""
    case = make_case(group=1, holes=(19, 21), candidates=range(4, 30))
    window = case.x.window
    assert window is not None
    direction = torch.zeros(DIM)
    direction[0] = 50.0
    window.queries[:] = direction
    for keys, _ in case.pool:
        keys[:] = 0
        keys[window.slots[window.positions == 20]] = direction
    scores = SnapKVScorer().score(case.x)
    lifted = case.x.positions[scores > 0.1].tolist()
    assert lifted == [17, 18, 20, 22, 23]
    assert scores[scores > 0.1].unique().numel() == 1


def test_r_kv_keeps_the_newest_of_equal_keys() -> None:
    """Repetitions are redundant, the newest of them least; the one before it is spared once, by the newest."""
    case = make_case(length=60, group=1, holes=(), candidates=range(40))
    copies = [2, 4, 11, 13, 20, 25, 30, 35]
    for keys, _ in case.pool:
        slots = case.x.slots[copies]
        keys[slots] = keys[slots[0]].clone()
    window = case.x.window
    assert window is not None
    window.queries[:] = 0  # all equally important
    scores = RKVScorer().score(case.x)
    repeated, others = scores[copies], scores[np.delete(np.arange(40), copies)]
    assert repeated[:6].max() < repeated[6] < repeated[7]
    assert repeated[6] < others.min()


def test_keydiff_drops_what_all_look_like() -> None:
    case = make_case(length=60, holes=(), candidates=range(40))
    for keys, _ in case.pool:
        keys[:] = torch.ones(DIM)
        keys[case.x.slots[7]] = -torch.ones(DIM)
        keys[case.x.slots[8]] = 0
    scores = KeyDiffScorer().score(case.x)
    assert scores[7].item() == pytest.approx(1)
    assert scores[8].item() == 0
    assert scores[[0, 39]].tolist() == pytest.approx([-1, -1])


def test_expected_attention_is_the_mean_over_drawn_queries() -> None:
    """Without values' norms: E[exp(q . k / sqrt(D))] over q ~ N(mu, Sigma), estimated by drawing a million queries."""
    case = make_case(group=1, candidates=range(10, 14), holes=())
    assert case.x.covariance is not None
    covariance = case.x.covariance * 0.2
    ones = torch.ones_like(case.pool[0][1])
    x = replace(case.x, covariance=covariance, layer_values=lambda layer: ones, num_layers=1)
    x.query[:] = x.query * 0.3
    generator = torch.Generator().manual_seed(1)
    expected = torch.zeros(4, dtype=torch.float64)
    for h in range(KV_HEADS):
        root = torch.linalg.cholesky(covariance[0, h].double())
        noise = torch.randn(1_000_000, DIM, dtype=torch.float64, generator=generator)
        drawn = x.query[0, h].double() + noise @ root.T
        weights = (drawn @ case.keys(0, x.slots)[:, h].T / math.sqrt(DIM)).exp().mean(0)
        expected += weights / weights.sum()
    torch.testing.assert_close(ExpectedAttentionScorer().score(x).double(), expected, rtol=0.02, atol=0)


@pytest.mark.parametrize("scorer", [SnapKVScorer, RKVScorer, KeyDiffScorer, ExpectedAttentionScorer])
def test_equal_tokens_score_alike(scorer: type[Scorer]) -> None:
    """Ties stay ties: with one key and value for all, nothing tells the tokens far from the edges apart."""
    case = make_case(length=60, holes=(), candidates=range(10, 40))
    for keys, values in case.pool:
        keys[:], values[:] = keys[0].clone(), values[0].clone()
    scores = scorer().score(case.x)
    torch.testing.assert_close(scores, scores[:1].expand(len(scores)), rtol=1e-5, atol=1e-6)
