"""Training of the residual head: seeded, resumable to the same bits, and stopped by the first number that is none."""

import dataclasses
import json
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from intentkv.keep.budget import Budget
from intentkv.score.head.model import ResidualHead
from intentkv.train.dataset import FeatureSet
from intentkv.train.loss import LossWeights, row_loss
from intentkv.train.recall import BUDGETS, head_scores, row_recall


class TrainingStopped(RuntimeError):
    """The run cannot go on; the message says where it stood and what to do."""


@dataclass(frozen=True)
class TrainSettings:
    """Attributes:
    epochs: passes over the training rows.
    seed: of the head's first weights, of the split and of the order of rows.
    batch: rows a step.
    learning_rate, weight_decay: of AdamW; constant, so that a run can be made longer later.
    validation_share: of the traces, held back to choose the epoch by.
    loss: weights of the loss terms.
    """

    epochs: int = 12
    seed: int = 0
    batch: int = 8
    learning_rate: float = 1e-3
    weight_decay: float = 0.01
    validation_share: float = 0.15
    loss: LossWeights = field(default_factory=LossWeights)


@dataclass
class Run:
    """Where a run stands after `epoch` whole epochs (0 = untrained).

    Attributes:
        curve: one row an epoch, the untrained head first: epoch, train_loss (none for that first row), validation_loss,
            and validation recall by budget.
        best_epoch, best: the epoch with the highest mean validation recall, and the head's weights then.
    """

    head: ResidualHead
    optimizer: torch.optim.Optimizer
    epoch: int = 0
    curve: list[dict[str, Any]] = field(default_factory=list)
    best_epoch: int = 0
    best: dict[str, Any] = field(default_factory=dict)


class Trainer:
    """Trains one head on one feature set."""

    def __init__(self, data: FeatureSet, settings: TrainSettings, checkpoint: Path) -> None:
        """`checkpoint`: written after every epoch, whole or not at all. Raises ValueError if `data` is too small."""
        self._data = data
        self._settings = settings
        self._checkpoint = checkpoint
        self.training, self.validation = _split(data.trace_of, settings)
        if not self.training or not self.validation:
            raise ValueError(f"expected rows of at least two traces, got {len(data)} rows of {len(set(data.trace_of))}")

    def run(self, *, resume: bool, on_step: Callable[[], None], on_epoch: Callable[[dict[str, Any]], None]) -> Run:
        """Train up to `settings.epochs` and return the run; `resume` goes on from the checkpoint.

        A resumed run ends with the weights, bit for bit, of one that was never interrupted: the order of rows depends
        on seed and epoch alone, and the head draws nothing while it trains.

        Raises:
            TrainingStopped: a loss or a weight is not finite, or the checkpoint is of another run.
        """
        run = self._new_run()
        if resume:
            self._load(run)
        else:
            self._end_epoch(run, None, on_epoch)
        while run.epoch < self._settings.epochs:
            train_loss = self._train_epoch(run, on_step)
            run.epoch += 1
            self._end_epoch(run, train_loss, on_epoch)
        return run

    def steps(self) -> int:
        """Steps of one epoch."""
        return math.ceil(len(self.training) / self._settings.batch)

    def _new_run(self) -> Run:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(self._settings.seed)
            head = ResidualHead(self._data.identity.head_dim)
        settings = self._settings
        optimizer = torch.optim.AdamW(head.parameters(), lr=settings.learning_rate, weight_decay=settings.weight_decay)
        return Run(head, optimizer)

    def _train_epoch(self, run: Run, on_step: Callable[[], None]) -> float:
        """One pass; the mean loss of its rows."""
        settings = self._settings
        generator = torch.Generator().manual_seed(settings.seed * 1_000_003 + run.epoch)
        order = [self.training[i] for i in torch.randperm(len(self.training), generator=generator).tolist()]
        total = 0.0
        for step, start in enumerate(range(0, len(order), settings.batch)):
            batch = order[start : start + settings.batch]
            run.optimizer.zero_grad()
            for i in batch:
                loss = self._loss(run.head, i)
                (loss / len(batch)).backward()  # type: ignore[no-untyped-call]
                total += loss.item()
            if not math.isfinite(total) or not all(
                torch.isfinite(p.grad).all() for p in run.head.parameters() if p.grad is not None
            ):
                raise TrainingStopped(
                    f"epoch {run.epoch + 1}, step {step + 1}: expected a finite loss and gradient, got loss {total}. "
                    f"Nothing of this epoch is kept; the last whole epoch is in {self._checkpoint}. "
                    "Look for NaN in the features, or lower the learning rate"
                )
            run.optimizer.step()
            on_step()
        return total / len(order)

    def _loss(self, head: ResidualHead, i: int) -> torch.Tensor:
        example = self._data[i]
        row = example.row
        return row_loss(head_scores(head, example), row.positive, row.counted, row.memory_error, self._settings.loss)

    @torch.no_grad()
    def _end_epoch(self, run: Run, train_loss: float | None, on_epoch: Callable[[dict[str, Any]], None]) -> None:
        """Validate, remember the best weights, write the checkpoint."""
        loss, recalls = 0.0, dict.fromkeys(BUDGETS, 0.0)
        for i in self.validation:
            example = self._data[i]
            row, scores = example.row, head_scores(run.head, example)
            loss += row_loss(scores, row.positive, row.counted, row.memory_error, self._settings.loss).item()
            for budget in BUDGETS:
                recalls[budget] += row_recall(scores, row.positive, Budget.parse(budget)) / len(self.validation)
        measured = {
            "epoch": run.epoch,
            "train_loss": train_loss,
            "validation_loss": loss / len(self.validation),
            "recall": recalls,
        }
        run.curve.append(measured)
        if not run.best or sum(recalls.values()) > sum(run.curve[run.best_epoch]["recall"].values()):
            run.best_epoch = run.epoch
            run.best = {name: value.clone() for name, value in run.head.state_dict().items()}
        self._save(run)
        on_epoch(measured)

    def _made_of(self) -> str:
        """What must be equal for a checkpoint to be resumed; the number of epochs may grow."""
        settings = dataclasses.asdict(self._settings)
        del settings["epochs"]
        return json.dumps({"data_hash": self._data.data_hash, **settings}, sort_keys=True)

    def _save(self, run: Run) -> None:
        state = {
            "made_of": self._made_of(),
            "epoch": run.epoch,
            "curve": json.dumps(run.curve),
            "best_epoch": run.best_epoch,
            "best": run.best,
            "head": run.head.state_dict(),
            "optimizer": run.optimizer.state_dict(),
        }
        self._checkpoint.parent.mkdir(parents=True, exist_ok=True)
        unfinished = self._checkpoint.with_name(self._checkpoint.name + ".part")
        torch.save(state, unfinished)
        unfinished.replace(self._checkpoint)

    def _load(self, run: Run) -> None:
        try:
            state = torch.load(self._checkpoint, weights_only=True)
        except Exception as error:  # torch.load raises what pickle, zipfile and the file system raise
            raise TrainingStopped(
                f"{self._checkpoint}: expected the checkpoint of a run, cannot read it: {error}"
            ) from error
        if state["made_of"] != self._made_of():
            raise TrainingStopped(
                f"{self._checkpoint}: expected a run with {self._made_of()}, got one with {state['made_of']}: "
                "use the same data and settings, or start without resuming"
            )
        run.head.load_state_dict(state["head"])
        run.optimizer.load_state_dict(state["optimizer"])
        run.epoch, run.curve = state["epoch"], json.loads(state["curve"])
        run.best_epoch, run.best = state["best_epoch"], state["best"]


def _split(trace_of: Sequence[int], settings: TrainSettings) -> tuple[list[int], list[int]]:
    """Row numbers for training and for validation, parted by traces; a validation trace was never trained on."""
    traces = sorted(set(trace_of))
    generator = torch.Generator().manual_seed(settings.seed)
    shuffled = [traces[i] for i in torch.randperm(len(traces), generator=generator).tolist()]
    held_back = set(shuffled[: max(1, round(settings.validation_share * len(traces)))])
    rows = range(len(trace_of))
    return [i for i in rows if trace_of[i] not in held_back], [i for i in rows if trace_of[i] in held_back]
