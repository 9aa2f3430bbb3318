"""The validation curve of a run as a picture."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure


def plot_curve(curve: Sequence[Mapping[str, Any]], best_epoch: int, path: Path) -> None:
    """Draw the losses and the validation recall by epoch, from `Run.curve`, to `path` (the suffix tells the format)."""
    epochs = [row["epoch"] for row in curve]
    figure = Figure(figsize=(9, 3.5), layout="constrained")
    left, right = figure.subplots(1, 2)
    trained = [row for row in curve if row["train_loss"] is not None]
    left.plot([row["epoch"] for row in trained], [row["train_loss"] for row in trained], label="training")
    left.plot(epochs, [row["validation_loss"] for row in curve], label="validation")
    left.set(xlabel="epoch", ylabel="loss a row")
    for budget in curve[0]["recall"]:
        right.plot(epochs, [row["recall"][budget] for row in curve], label=f"budget {budget}")
    right.set(xlabel="epoch (0 = the rule)", ylabel="validation recall", ylim=(0, 1))
    for axes in (left, right):
        axes.axvline(best_epoch, color="gray", linewidth=0.8, linestyle=":")
        axes.legend()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path)
