"""What intentkv costs where it has nothing to do: decode steps of two real servers, stock and with the plug-in on.

    python scripts/bench_overhead.py [--json] [--pairs 20 --prompt 1000 --tokens 64]

Both servers are up at once, and sleep while idle, so that the two requests of a pair follow each other closely. Each pair sends one new prompt to both, the order changing from pair to pair; the plug-in observes and
remembers it as it does any request, but the budget is larger than any history, so nothing is scored or dropped. A decode
step is the time from the first token of a stream to its last, over the tokens between. Arguments that are not listed go to
both servers.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import random
import statistics
import tempfile
import time
import urllib.request
from pathlib import Path

from rich.console import Console
from rich.progress import track
from rich.table import Table

from intentkv.evals.model import model_path
from intentkv.evals.server import Server, running_server

console = Console(stderr=True)
SIDES = {"stock": [], "intentkv": ["--enable-intentkv", "--intentkv-budget", "1000000"]}
WARM_UP = 2  # pairs that are not counted
ANSWER_SECONDS = 600.0


def prompt_of(pair: int, tokens: int) -> list[int]:
    """Random token ids, another beginning for every pair, so that nobody finds a prefix."""
    draw = random.Random(pair)
    return [draw.randrange(1000, 30000) for _ in range(tokens)]


def request(server: Server, prompt: list[int], tokens: int) -> tuple[float, float]:
    """Milliseconds to the first token, and of one decode step after it.

    Raises:
        RuntimeError: the answer is shorter than asked for, or something was dropped.
    """
    body = {
        "input_ids": prompt,
        "stream": True,
        "sampling_params": {"temperature": 0, "max_new_tokens": tokens, "ignore_eos": True},
    }
    post = urllib.request.Request(
        f"{server.url}/generate", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    begin = time.perf_counter()
    first, first_count, last, meta = 0.0, 0, 0.0, {}
    with urllib.request.urlopen(post, timeout=ANSWER_SECONDS) as answer:
        for line in answer:
            text = line.decode().strip()
            if not text.startswith("data:") or text.endswith("[DONE]"):
                continue
            last = time.perf_counter()
            meta = json.loads(text.removeprefix("data:"))["meta_info"]
            if not first:
                first, first_count = last, meta["completion_tokens"]
    if meta.get("completion_tokens") != tokens:
        raise RuntimeError(f"expected {tokens} tokens from {server.url}, got {meta}; its log is {server.log}")
    if meta.get("intentkv", {}).get("dropped_tokens"):
        raise RuntimeError(
            f"expected that nothing is dropped, got {meta['intentkv']}: the budget must exceed the prompt"
        )
    return 1e3 * (first - begin), 1e3 * (last - first) / (tokens - first_count)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", type=int, default=20, help="counted pairs (default: %(default)s)")
    parser.add_argument("--prompt", type=int, default=1000, help="prompt tokens (default: %(default)s)")
    parser.add_argument("--tokens", type=int, default=64, help="generated tokens (default: %(default)s)")
    parser.add_argument("--model", type=Path, help="model folder (default: SmolLM2-135M-Instruct)")
    parser.add_argument("--json", action="store_true", help="print one JSON object as the last line")
    arguments, extra = parser.parse_known_args()
    if arguments.pairs < 2 or arguments.tokens < 8:
        parser.error("expected at least 2 --pairs and 8 --tokens")
    model = arguments.model or model_path()
    # Two servers share one device, so neither may take all of it; a pool this small is enough for one request at a time.
    flags = ["--max-total-tokens", str(4 * (arguments.prompt + arguments.tokens)), "--max-running-requests", "4"]
    flags += ["--sleep-on-idle", *extra]

    first: dict[str, list[float]] = {name: [] for name in SIDES}
    steps: dict[str, list[float]] = {name: [] for name in SIDES}
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as stack:
        servers = {}
        for name, own in SIDES.items():
            console.print(f"starting {name}")
            servers[name] = stack.enter_context(running_server(model, [*flags, *own], Path(folder) / f"{name}.log"))
        for pair in track(range(WARM_UP + arguments.pairs), "pairs", console=console, transient=True):
            order = list(SIDES) if pair % 2 else list(SIDES)[::-1]
            for name in order:
                to_first, step = request(servers[name], prompt_of(pair, arguments.prompt), arguments.tokens)
                if pair >= WARM_UP:
                    first[name].append(to_first)
                    steps[name].append(step)
    report(first, steps, arguments)


def report(first: dict[str, list[float]], steps: dict[str, list[float]], arguments: argparse.Namespace) -> None:
    table = Table(
        title=f"{arguments.pairs} pairs, {arguments.prompt} tokens in, {arguments.tokens} out, nothing pruned"
    )
    for column in ("", "stock ms", "intentkv ms", "intentkv / stock", "25 % .. 75 %"):
        table.add_column(column, justify="right")
    result: dict[str, object] = {}
    for key, name, series in (("overhead", "decode step", steps), ("prefill_overhead", "first token", first)):
        ratios = [ours / stock for stock, ours in zip(series["stock"], series["intentkv"], strict=True)]
        low, middle, high = statistics.quantiles(ratios, n=4)
        medians = [statistics.median(series[side]) for side in SIDES]
        table.add_row(name, f"{medians[0]:.2f}", f"{medians[1]:.2f}", f"{middle:.4f}", f"{low:.4f} .. {high:.4f}")
        result |= {key: round(middle, 4), f"{key}_spread": [round(low, 4), round(high, 4)]}
        result[f"{key}_milliseconds"] = dict(zip(SIDES, (round(m, 3) for m in medians), strict=True))
    console.print(table)
    if arguments.json:
        print(json.dumps({**result, "pairs": arguments.pairs, "prompt": arguments.prompt, "tokens": arguments.tokens}))


if __name__ == "__main__":
    main()
