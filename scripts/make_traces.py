"""Writes generated tool-call traces as OpenAI chat JSONL: the public training and test data of the residual head.

    python scripts/make_traces.py --world harbour --world festival --seed 1 --count 40 --out traces.jsonl

Trace i of a world is fixed by (world, seed + i). `--toolbench` writes the same traces as ToolBench does.
"""

import argparse
import json
from pathlib import Path

from intentkv.train.generate import make_trace, to_toolbench
from intentkv.train.worlds import WORLDS


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--world", action="append", choices=list(WORLDS), required=True, help="task family; repeatable")
    parser.add_argument("--seed", type=int, default=0, help="of each world's first trace (default: %(default)s)")
    parser.add_argument("--count", type=int, required=True, help="traces in all, taken from the worlds in turn")
    parser.add_argument("--toolbench", action="store_true", help="write `conversations` instead of `messages`")
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    args.out.parent.mkdir(parents=True, exist_ok=True)
    with open(args.out, "w", encoding="utf-8") as file:
        for i in range(args.count):
            turn, world = divmod(i, len(args.world))
            trace = make_trace(WORLDS[args.world[world]], args.seed + turn)
            file.write(json.dumps(to_toolbench(trace) if args.toolbench else trace, ensure_ascii=False) + "\n")
    print(f"{args.count} traces in {args.out}")


if __name__ == "__main__":
    main()
