"""Concurrent agents on stock SGLang and on intentkv, in turn, with the same pool, sessions and flags.

python scripts/bench_serving.py --agents 8 --pool quarter [--json]
python scripts/bench_serving.py --agents 8 --pool ample
"""

from __future__ import annotations

import argparse
import json
import signal
import statistics
import tempfile
from pathlib import Path

from rich.console import Console
from rich.progress import Progress
from rich.table import Table
from transformers import AutoTokenizer

from intentkv.evals.families import SHORT_FACTS
from intentkv.evals.load import LoadResult, play_together
from intentkv.evals.model import model_path
from intentkv.evals.server import running_server
from intentkv.evals.sessions import Session, make_session

console = Console(stderr=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--agents", type=int, default=8, help="concurrent agents, one session each (default: 8)")
    parser.add_argument("--pool", default="quarter", help="quarter, ample, or a number of tokens (default: quarter)")
    parser.add_argument("--budget", default="256", help="--intentkv-budget of our side (default: 256)")
    parser.add_argument("--trigger", default="64", help="--intentkv-trigger of our side (default: 64)")
    parser.add_argument("--records", type=int, default=6, help="turns that load a record (default: 6)")
    parser.add_argument("--late", type=int, default=2, help="turns after them that only ask (default: 2)")
    parser.add_argument("--seed", type=int, default=100, help="seed of the first session (default: 100)")
    parser.add_argument("--model", type=Path, help="model folder (default: SmolLM2-135M-Instruct)")
    parser.add_argument("--json", action="store_true", help="print one JSON object as the last line")
    arguments = parser.parse_args()
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # stopped by `kill` as by Ctrl-C: the server stops first
    model = arguments.model or model_path()
    families = list(SHORT_FACTS.values())
    sessions = [
        make_session(families[n % len(families)], arguments.seed + n, records=arguments.records, late=arguments.late)
        for n in range(arguments.agents)
    ]
    full = sum(final_tokens(session, model) for session in sessions)
    pool = {"quarter": full // 4, "ample": 2 * full}.get(arguments.pool) or int(arguments.pool)
    console.print(f"{len(sessions)} agents, {full} tokens of full KV, pool of {pool} tokens")

    flags = ["--max-total-tokens", str(pool), "--enable-cache-report", "--enable-metrics"]
    flags += ["--chunked-prefill-size", "512", "--max-running-requests", str(arguments.agents)]
    sides = {
        "stock": [],
        "intentkv": [
            "--enable-intentkv",
            "--intentkv-budget",
            arguments.budget,
            "--intentkv-trigger",
            arguments.trigger,
        ],
    }
    results = {name: run(name, sessions, model, [*flags, *extra]) for name, extra in sides.items()}
    show(results)
    stock, ours = results["stock"], results["intentkv"]
    ratio = ours.turns_per_second() / stock.turns_per_second() if stock.turns else float("inf")
    summary = {
        "turns_per_s_ratio": ratio,
        "prefix_hit_ratio": ours.prefix_hit() / stock.prefix_hit() if stock.prefix_hit() else None,
        "ample_loss": 1 - ratio if arguments.pool == "ample" else None,
        "errors": len(stock.errors) + len(ours.errors),
        "pool": pool,
        "agents": arguments.agents,
        "sides": {name: figures(result) for name, result in results.items()},
    }
    for result in results.values():
        for error in result.errors:
            console.print(f"error: {error}", markup=False)
    if arguments.json:
        print(json.dumps(summary))
    return 1 if summary["errors"] else 0


def final_tokens(session: Session, model: Path) -> int:
    """Tokens of the whole session with the expected answers: what full KV would hold at its end."""
    tokenizer = AutoTokenizer.from_pretrained(model)
    messages = [{"role": "system", "content": session.system}]
    for turn in session.turns:
        messages += [*turn.messages, {"role": "assistant", "content": turn.expected}]
    return len(tokenizer.apply_chat_template(messages, tokenize=True, return_dict=False))


def run(name: str, sessions: list[Session], model: Path, flags: list[str]) -> LoadResult:
    turns = sum(len(session.turns) for session in sessions)
    with tempfile.TemporaryDirectory() as folder, Progress(console=console, transient=True) as progress:
        task = progress.add_task(f"{name}: starting", total=turns)
        with running_server(model, flags, Path(folder) / "server.log") as server:
            progress.update(task, description=name)
            result = play_together(sessions, server.url, finished=lambda: progress.advance(task))
    console.print(f"{name}: {len(result.turns)} turns in {result.seconds:.0f} s")
    return result


def figures(result: LoadResult) -> dict[str, float]:
    """Every figure of one side; times in seconds."""
    first, between = result.to_first_token(), result.between_tokens()
    return {
        "turns": len(result.turns),
        "errors": len(result.errors),
        "turns_per_s": result.turns_per_second(),
        "prefix_hit": result.prefix_hit(),
        "right": sum(turn.right for turn in result.turns),
        "ttft_p50": quantile(first, 50),
        "ttft_p95": quantile(first, 95),
        "itl_p50": quantile(between, 50),
        "itl_p95": quantile(between, 95),
        "peak_used": result.peak_used,
        "retractions": result.counters.get("sglang:num_retractions_sum", 0.0),
        "dropped_tokens": result.counters.get("intentkv_dropped_tokens_total", 0.0),
        "freed_slots": result.counters.get("intentkv_freed_slots_total", 0.0),
        "seconds": result.seconds,
    }


def quantile(values: list[float], percent: int) -> float:
    return statistics.quantiles(values, n=100)[percent - 1] if len(values) > 1 else float("nan")


def show(results: dict[str, LoadResult]) -> None:
    table = Table(title="concurrent agents, same pool")
    table.add_column("figure")
    for name in results:
        table.add_column(name, justify="right")
    sides = [figures(result) for result in results.values()]
    for key in sides[0]:
        table.add_row(key, *(f"{side[key]:.4g}" for side in sides))
    console.print(table)


if __name__ == "__main__":
    raise SystemExit(main())
