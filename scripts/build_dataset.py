"""Turns multi-turn tool-call traces into feature shards for the residual head, with one forward of the model a trace.

    python scripts/build_dataset.py --traces traces.jsonl --model MODEL --out features/

Traces are OpenAI chat (`messages`) or ToolBench-like (`conversations`) JSONL. A row is a turn's history; a token is
positive if an argument of one of the next 5 tool calls literally occurs there. Rows without a positive are dropped.
Query tokens are no candidates and template tokens take no part in the loss. Runs on the CPU.
"""

import argparse
import dataclasses
import shlex
import sys
from pathlib import Path

import torch
from rich.progress import MofNCompleteColumn, Progress
from transformers import AutoTokenizer

from intentkv.train.capture import CaptureModel
from intentkv.train.dataset import ShardWriter
from intentkv.train.examples import ExampleMaker
from intentkv.train.render import Renderer
from intentkv.train.traces import read_traces


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--traces", type=Path, nargs="+", required=True, help="JSONL files")
    parser.add_argument("--model", required=True, help="checkpoint folder or hub name")
    parser.add_argument("--out", type=Path, required=True, help="new folder for the shards")
    parser.add_argument(
        "--max-tokens", type=int, default=8192, help="longer traces are left out (default: %(default)s)"
    )
    parser.add_argument("--threads", type=int, default=None, help="torch threads (default: torch's choice)")
    args = parser.parse_args()
    if args.threads is not None:
        torch.set_num_threads(args.threads)
    try:
        traces = [trace for path in args.traces for trace in read_traces(path)]
        renderer = Renderer(AutoTokenizer.from_pretrained(args.model))
        model = CaptureModel(args.model)
        writer = ShardWriter(args.out, model.identity)
        maker = ExampleMaker(model, renderer)
        too_long = 0
        with Progress(*Progress.get_default_columns(), MofNCompleteColumn()) as progress:
            for trace in progress.track(traces, description="traces"):
                rendered = renderer.render(trace)
                if len(rendered.ids) > args.max_tokens:
                    too_long += 1
                    continue
                writer.add(maker.make(rendered))
        tally = {"traces": len(traces), "too_long": too_long, **dataclasses.asdict(maker.tally)}
        data_hash = writer.close(shlex.join(["python", *sys.argv]), tally)
    except (ValueError, OSError) as error:
        sys.exit(f"build_dataset: {error}")
    print(", ".join(f"{name.replace('_', ' ')} {count}" for name, count in tally.items()))
    print(f"{args.out}: data hash {data_hash}")


if __name__ == "__main__":
    main()
