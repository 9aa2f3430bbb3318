"""Training: the loss by hand, equal weights after a resume, a stop at the first number that is none, and recall."""

import dataclasses
import math
from pathlib import Path
from typing import Any

import pytest
import torch

from intentkv.keep.budget import Budget
from intentkv.score.head.identity import ModelIdentity
from intentkv.score.head.model import ResidualHead
from intentkv.train.curve import plot_curve
from intentkv.train.dataset import FeatureSet, ShardWriter
from intentkv.train.examples import Row, TraceRows
from intentkv.train.loss import LossWeights, row_loss
from intentkv.train.recall import head_scores, rankings, recall, row_recall
from intentkv.train.trainer import Run, Trainer, TrainingStopped, TrainSettings

IDENTITY = ModelIdentity("toy", "a" * 64, head_dim=8, layers=1, heads=2, kv_heads=1)
SETTINGS = TrainSettings(epochs=4, batch=4, learning_rate=3e-3)


pytestmark = pytest.mark.usefixtures("one_thread")


def write_features(folder: Path, *, spoiled: bool = False) -> FeatureSet:
    """Ten traces of four rows, in which a token is positive where the first entry of its mean key is large."""
    generator = torch.Generator().manual_seed(0)
    writer = ShardWriter(folder, IDENTITY)
    for number in range(10):
        keys = torch.randn(90, 8, generator=generator)
        rows = []
        for _ in range(4):
            positions = torch.arange(80)
            rule = torch.rand(80, generator=generator) * 0.1
            rows.append(
                Row(
                    positions=positions,
                    rule=rule,
                    rescaled=rule * 2,
                    memory=torch.randn(8, generator=generator),
                    memory_error=0.0,
                    span=torch.arange(80, 90),
                    positive=(keys[:80, 0] > 1.2) & (positions % 7 != 0),
                    counted=positions % 7 != 0,
                )
            )
            if spoiled and number == 5:
                rows[-1].rule[3] = torch.nan
        writer.add(TraceRows(keys, rows))
    writer.close("test", {})
    return FeatureSet(folder)


@pytest.fixture
def data(tmp_path: Path) -> FeatureSet:
    return write_features(tmp_path / "features")


def train(
    data: FeatureSet,
    checkpoint: Path,
    epochs: int = 4,
    *,
    resume: bool = False,
    stop_at: int | None = None,
    **changes: Any,
) -> Run:
    """Train; `stop_at` breaks off in the middle of that step, as an interrupt would."""
    steps = 0

    def on_step() -> None:
        nonlocal steps
        steps += 1
        if steps == stop_at:
            raise KeyboardInterrupt

    settings = dataclasses.replace(SETTINGS, epochs=epochs, **changes)
    return Trainer(data, settings, checkpoint).run(resume=resume, on_step=on_step, on_epoch=lambda measured: None)


def bits(run: Run) -> dict[str, torch.Tensor]:
    return {name: value.view(torch.int32) for name, value in run.head.state_dict().items()}


def same(one: Run, other: Run) -> bool:
    return all(torch.equal(bits(one)[name], bits(other)[name]) for name in bits(one))


def test_a_seed_gives_one_result_and_another_seed_another(data: FeatureSet, tmp_path: Path) -> None:
    one, two = (train(data, tmp_path / name) for name in ("one", "two"))
    assert same(one, two)
    assert one.curve == two.curve
    assert not same(one, train(data, tmp_path / "three", seed=1))


def test_training_leaves_the_global_generator_alone(data: FeatureSet, tmp_path: Path) -> None:
    before = torch.get_rng_state()
    train(data, tmp_path / "run", epochs=1)
    assert torch.equal(before, torch.get_rng_state())


def test_a_resumed_run_ends_with_identical_weights(data: FeatureSet, tmp_path: Path) -> None:
    whole = train(data, tmp_path / "whole")
    train(data, tmp_path / "parts", epochs=2)
    resumed = train(data, tmp_path / "parts", resume=True)
    assert same(whole, resumed)
    assert (resumed.curve, resumed.best_epoch) == (whole.curve, whole.best_epoch)
    assert all(torch.equal(resumed.best[name], value) for name, value in whole.best.items())


def test_so_does_one_that_was_interrupted_within_an_epoch(data: FeatureSet, tmp_path: Path) -> None:
    whole = train(data, tmp_path / "whole")
    with pytest.raises(KeyboardInterrupt):
        train(data, tmp_path / "cut", stop_at=19)  # nine steps an epoch: in the third
    resumed = train(data, tmp_path / "cut", resume=True)
    assert same(whole, resumed)
    assert resumed.curve == whole.curve


def test_a_checkpoint_of_another_run_is_refused(data: FeatureSet, tmp_path: Path) -> None:
    train(data, tmp_path / "run", epochs=1)
    with pytest.raises(TrainingStopped, match="use the same data and settings"):
        train(data, tmp_path / "run", resume=True, seed=9)
    with pytest.raises(TrainingStopped, match="expected the checkpoint of a run, cannot read it"):
        train(data, tmp_path / "none", resume=True)


def test_training_stops_at_nan_and_says_where(tmp_path: Path) -> None:
    data = write_features(tmp_path / "features", spoiled=True)
    trainer = Trainer(data, SETTINGS, tmp_path / "run")
    assert any(data.trace_of[i] == 5 for i in trainer.training), "the spoiled trace is trained on"
    with pytest.raises(TrainingStopped, match=r"epoch 1, step \d+: expected a finite loss and gradient, got loss nan"):
        trainer.run(resume=False, on_step=lambda: None, on_epoch=lambda measured: None)


def test_the_head_learns_what_the_rule_cannot_know(data: FeatureSet, tmp_path: Path) -> None:
    run = train(data, tmp_path / "run", epochs=8)
    assert run.curve[0]["epoch"] == 0
    assert run.curve[0]["train_loss"] is None
    assert run.curve[-1]["validation_loss"] < run.curve[0]["validation_loss"]
    assert run.curve[run.best_epoch]["recall"]["25%"] > run.curve[0]["recall"]["25%"] + 0.2


def test_validation_traces_are_never_trained_on(data: FeatureSet, tmp_path: Path) -> None:
    trainer = Trainer(data, SETTINGS, tmp_path / "run")
    trained, held_back = ({data.trace_of[i] for i in rows} for rows in (trainer.training, trainer.validation))
    assert not trained & held_back
    assert sorted(trainer.training + trainer.validation) == list(range(len(data)))


def test_an_untrained_head_ranks_as_the_rule(data: FeatureSet) -> None:
    named = rankings(ResidualHead(8))
    table = recall(data, named)
    assert table["rule + head (intent-head)"] == table["rule (intent-rule)"]
    assert torch.equal(head_scores(ResidualHead(8), data[0]), data[0].row.rule)


def test_recall_counts_the_positives_that_a_budget_keeps() -> None:
    scores = torch.tensor([0.0, 9.0, 1.0, 8.0, 2.0, 7.0, 3.0, 6.0])
    positive = torch.tensor([True, True, False, True, False, False, False, True])
    assert row_recall(scores, positive, Budget.parse("50%")) == 0.75  # keeps 9, 8, 7 and 6
    assert row_recall(scores, positive, Budget.parse("25%")) == 0.5
    assert row_recall(scores, positive, Budget.parse("100%")) == 1.0


def by_hand(scores: list[float], positive: list[bool], weights: LossWeights, memory_error: float) -> float:
    """The four terms, with plain floats."""
    chosen = [s for s, p in zip(scores, positive, strict=True) if p]
    others = [s for s, p in zip(scores, positive, strict=True) if not p]

    def softplus(x: float) -> float:
        return math.log1p(math.exp(x))

    balance = len(others) / len(chosen)
    bce = (sum(balance * softplus(-s) for s in chosen) + sum(softplus(s) for s in others)) / len(scores)
    ranking = sum(softplus(n - p) for n in others for p in chosen) / (len(others) * len(chosen))
    keep = (sum(1 / (1 + math.exp(-s)) for s in scores) / len(scores) - weights.keep_share) ** 2
    return bce + weights.ranking * ranking + weights.keep * keep + weights.memory * memory_error


def test_the_loss_is_the_sum_of_its_four_terms() -> None:
    weights = LossWeights(ranking=0.7, keep=0.3, memory=0.2)
    scores, positive = [0.5, -1.0, 2.0, 0.1, -0.3], [True, False, False, False, True]
    masked = torch.tensor([*scores, 50.0])
    loss = row_loss(
        masked, torch.tensor([*positive, False]), torch.tensor([True] * 5 + [False]), memory_error=0.25, weights=weights
    )
    assert loss.item() == pytest.approx(by_hand(scores, positive, weights, 0.25), rel=1e-5)


def test_only_the_hardest_negatives_are_ranked_against() -> None:
    weights = LossWeights(keep=0, memory=0)
    scores = torch.cat([torch.tensor([0.0]), torch.full((64,), 1.0), torch.full((500,), -30.0)]).requires_grad_()
    positive = torch.arange(565) == 0
    everything = torch.ones(565, dtype=torch.bool)
    with_ranking = row_loss(scores, positive, everything, 0.0, weights)
    without = row_loss(scores, positive, everything, 0.0, dataclasses.replace(weights, ranking=0))
    assert (with_ranking - without).item() == pytest.approx(math.log1p(math.e), rel=1e-5)


def test_a_row_that_is_all_positive_has_no_ranking_term() -> None:
    loss = row_loss(torch.zeros(4), torch.ones(4) > 0, torch.ones(4) > 0, 0.0, LossWeights(keep=0))
    assert loss.item() == pytest.approx(math.log(2))


def test_the_curve_is_drawn(data: FeatureSet, tmp_path: Path) -> None:
    run = train(data, tmp_path / "run", epochs=2)
    plot_curve(run.curve, run.best_epoch, tmp_path / "plots" / "curve.png")
    assert (tmp_path / "plots" / "curve.png").read_bytes().startswith(b"\x89PNG")
