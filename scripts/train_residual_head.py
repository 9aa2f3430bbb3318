"""Trains the residual head on feature shards, on the CPU, and says whether it beats the rule.

    python scripts/train_residual_head.py --data features/ --model MODEL --out head.safetensors [--held-out features2/]

A share of the traces is held back to choose the epoch by. After every epoch a checkpoint is written beside `--out`; a run
that was interrupted goes on with `--resume` and ends with the same weights. `--held-out` is looked at once, at the end.
The validation curve goes to OUT.png.
"""

import argparse
import json
import shlex
import sys
from pathlib import Path

import torch
from rich.console import Console
from rich.progress import MofNCompleteColumn, Progress
from rich.table import Table
from transformers import AutoConfig

from intentkv.score.head.identity import ModelIdentity
from intentkv.score.head.io import HeadInfo, save_head
from intentkv.score.head.model import ResidualHead
from intentkv.train.curve import plot_curve
from intentkv.train.dataset import FeatureSet
from intentkv.train.recall import BUDGETS, rankings, recall
from intentkv.train.trainer import Run, Trainer, TrainingStopped, TrainSettings


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--data", type=Path, required=True, help="folder of scripts/build_dataset.py")
    parser.add_argument("--model", required=True, help="the model the features were made with: folder or hub name")
    parser.add_argument("--out", type=Path, required=True, help="the head, .safetensors")
    parser.add_argument("--held-out", type=Path, help="features that nothing is chosen on, for the figures at the end")
    parser.add_argument("--epochs", type=int, default=TrainSettings.epochs, help="(default: %(default)s)")
    parser.add_argument("--seed", type=int, default=TrainSettings.seed, help="(default: %(default)s)")
    parser.add_argument("--resume", action="store_true", help="go on from the checkpoint beside --out")
    parser.add_argument("--threads", type=int, default=None, help="torch threads (default: torch's choice)")
    parser.add_argument("--json", action="store_true", help="print one JSON object as the last line")
    args = parser.parse_args()
    if args.threads is not None:
        torch.set_num_threads(args.threads)
    try:
        identity = ModelIdentity.of(Path(args.model).name, AutoConfig.from_pretrained(args.model))
        data = FeatureSet(args.data)
        held_out = None if args.held_out is None else FeatureSet(args.held_out)
        for features in (data, held_out):
            if features is not None and (wrong := features.identity.reasons_against(identity)):
                raise ValueError("the features do not belong to --model: " + "; ".join(wrong))
        settings = TrainSettings(epochs=args.epochs, seed=args.seed)
        trainer = Trainer(data, settings, args.out.with_name(args.out.name + ".resume"))
        run = with_progress(trainer, settings.epochs, args.resume)
        result = finish(args, run, data, held_out, identity)
    except (ValueError, OSError, TrainingStopped) as error:
        sys.exit(f"train_residual_head: {error}")
    if args.json:
        print(json.dumps(result))


def with_progress(trainer: Trainer, epochs: int, resume: bool) -> Run:
    with Progress(*Progress.get_default_columns(), MofNCompleteColumn()) as progress:
        bar = progress.add_task("steps", total=epochs * trainer.steps())

        def on_epoch(measured: dict) -> None:
            progress.update(bar, completed=measured["epoch"] * trainer.steps())
            train = "     -" if measured["train_loss"] is None else f"{measured['train_loss']:6.3f}"
            recalls = "  ".join(f"{budget} {share:.3f}" for budget, share in measured["recall"].items())
            progress.console.print(
                f"epoch {measured['epoch']:3}  loss {train}  validation {measured['validation_loss']:6.3f}  recall {recalls}"
            )

        return trainer.run(resume=resume, on_step=lambda: progress.advance(bar), on_epoch=on_epoch)


def finish(
    args: argparse.Namespace, run: Run, data: FeatureSet, held_out: FeatureSet | None, identity: ModelIdentity
) -> dict:
    """Write head and curve, print the table; the figures."""
    head = ResidualHead(identity.head_dim)
    head.load_state_dict(run.best)
    head.eval()
    metrics = {f"validation_recall_{budget}": share for budget, share in run.curve[run.best_epoch]["recall"].items()}
    metrics |= {"epochs": run.epoch, "best_epoch": run.best_epoch}
    table = None if held_out is None else recall(held_out, rankings(head))
    if table is not None:
        metrics |= {f"held_out_{name}_{budget}": table[name][budget] for name in table for budget in BUDGETS}
    command = shlex.join(["python", *sys.argv])
    save_head(args.out, head, HeadInfo(identity, data.data_hash, args.seed, command, metrics))
    plot_curve(run.curve, run.best_epoch, args.out.with_suffix(".png"))
    console = Console()
    console.print(f"best epoch {run.best_epoch} of {run.epoch}; {args.out}; curve {args.out.with_suffix('.png')}")
    if table is not None:
        shown = Table("held-out recall at a budget of", *BUDGETS)
        for name, shares in table.items():
            shown.add_row(name, *(f"{shares[budget]:.3f}" for budget in BUDGETS))
        console.print(shown)
    return {"best_epoch": run.best_epoch, "epochs": run.epoch, "curve": run.curve, "held_out": table}


if __name__ == "__main__":
    main()
