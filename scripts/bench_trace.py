"""What a trace costs: the turns of agent sessions on two real servers that prune alike, one of them with `--intentkv-trace`.

    python scripts/bench_trace.py [--json] [--sessions 4 --budget 256]

Both servers are up at once, and sleep while idle, so that the two requests of a pair follow each other closely; who goes first
changes from turn to turn. A turn is one request, from the prompt to the end of its answer. The answers and what is dropped
must be equal.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import statistics
import sys
import tempfile
from pathlib import Path

from rich.console import Console
from rich.progress import track
from rich.table import Table

from intentkv.evals.client import TurnResult, play
from intentkv.evals.families import FAMILIES
from intentkv.evals.model import model_path
from intentkv.evals.server import SMALL_POOL, running_server
from intentkv.evals.sessions import make_session

console = Console(stderr=True)
SIDES = ("off", "on")


def pairs(urls: dict[str, str], family: str, seed: int) -> list[dict[str, TurnResult]]:
    """Both results of every turn of one session.

    Raises:
        RuntimeError: the servers did not do the same.
    """
    session = make_session(FAMILIES[family], seed)
    players = {side: play(session, urls[side]) for side in SIDES}
    told = []
    for number in range(len(session.turns)):
        pair = {side: next(players[side]) for side in (SIDES if number % 2 else SIDES[::-1])}
        same = [(pair[side].answer, (pair[side].intentkv or {}).get("dropped_tokens")) for side in SIDES]
        if same[0] != same[1]:
            raise RuntimeError(f"expected equal answers with and without a trace, got {same} in turn {number + 1}")
        told.append(pair)
    return told


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sessions", type=int, default=4, help="sessions to play (default: %(default)s)")
    parser.add_argument("--budget", default="256", help="history tokens kept (default: %(default)s)")
    parser.add_argument("--json", action="store_true", help="print one JSON object as the last line")
    arguments, extra = parser.parse_known_args()
    flags = [*SMALL_POOL, "--sleep-on-idle", "--enable-intentkv", "--intentkv-budget", arguments.budget, *extra]
    families = list(FAMILIES)
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as stack:
        trace = Path(folder) / "trace"
        urls = {}
        for side in SIDES:
            own = [*flags, "--intentkv-trace", str(trace)] if side == "on" else flags
            console.print(f"starting the server with its trace {side}")
            urls[side] = stack.enter_context(running_server(model_path(), own, Path(folder) / f"{side}.log")).url
        turns: list[dict[str, TurnResult]] = []
        for seed in track(range(1 + arguments.sessions), "sessions", console=console, transient=True):
            played = pairs(urls, families[seed % len(families)], seed)
            turns += played if seed else []  # the first warms both up
        written = sum(path.stat().st_size for path in trace.rglob("*") if path.is_file())
    if not written:
        sys.exit("expected a trace on disk, got none")
    seconds = {side: [pair[side].seconds for pair in turns] for side in SIDES}
    ratios = [on / off for off, on in zip(seconds["off"], seconds["on"], strict=True)]
    low, middle, high = statistics.quantiles(ratios, n=4)
    whole = sum(seconds["on"]) / sum(seconds["off"])
    dropping = sum(bool(pair["on"].intentkv and pair["on"].intentkv["events"]) for pair in turns)
    table = Table(title=f"{len(turns)} turns, {dropping} of them with an event, {written / 2**10:.0f} KiB of trace")
    for column in ("trace off s", "trace on s", "on / off", "25 % .. 75 %", "all turns together"):
        table.add_column(column, justify="right")
    medians = [statistics.median(seconds[side]) for side in SIDES]
    table.add_row(*(f"{m:.3f}" for m in medians), f"{middle:.4f}", f"{low:.4f} .. {high:.4f}", f"{whole:.4f}")
    console.print(table)
    if arguments.json:
        figures = {"trace_cost": round(middle, 4), "trace_cost_spread": [round(low, 4), round(high, 4)]}
        figures |= {"whole": round(whole, 4), "turns": len(turns), "with_events": dropping, "trace_bytes": written}
        print(json.dumps({**figures, "seconds": {s: [round(t, 4) for t in seconds[s]] for s in SIDES}}))


if __name__ == "__main__":
    main()
