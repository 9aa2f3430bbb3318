"""`intentkv demo`: the same agent session on a stock server and with intentkv, turn by turn."""

import argparse
import shutil
import signal
import sys
import tempfile
import time
from pathlib import Path

import openai
from rich.console import Console
from rich.table import Table

from intentkv.evals.cache_folder import cache_folder
from intentkv.evals.client import TurnResult, play
from intentkv.evals.families import FAMILIES
from intentkv.evals.model import NAME, model_path
from intentkv.evals.server import SMALL_POOL, ServerError, running_server, tail
from intentkv.evals.sessions import Session, make_session
from intentkv.report.command import write_report
from intentkv.report.read import ReportError

GPU_LINE = "python -m sglang.launch_server --model-path Qwen/Qwen3-8B --enable-intentkv"
Results = dict[str, list[TurnResult]]  # server name -> one result a turn


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the demo's arguments to `parser`."""
    parser.add_argument("--family", choices=sorted(FAMILIES), default="order-desk", help="the world of the session")
    parser.add_argument("--seed", type=int, default=0, help="which session of that family")
    parser.add_argument("--budget", default="25%", help="history tokens kept: a number, or a share such as 25%%")


def run(arguments: argparse.Namespace) -> int:
    """Plays the session on both servers, one after the other, and prints the table and the path of a report.

    Returns the exit status: 0 done, 1 a server failed (its log's end is printed), 130 interrupted. No server outlives it.
    """
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # stopped by `kill` as by Ctrl-C: servers stopped first
    console = Console(stderr=True)
    session = make_session(FAMILIES[arguments.family], arguments.seed, records=7, late=3)
    trace = Path(tempfile.mkdtemp(prefix="trace-", dir=cache_folder("demo")))
    servers = {
        "stock": [],
        "intentkv": ["--enable-intentkv", "--intentkv-budget", arguments.budget, "--intentkv-trace", str(trace)],
    }
    results: Results = {}
    try:
        model = model_path()
        for name, flags in servers.items():
            results[name] = _play_on(name, model, flags, session, console)
        report = write_report(trace, cache_folder("demo") / "report.html", str(model), session.name)
    except KeyboardInterrupt:
        console.print("interrupted; servers are stopped")
        return 130
    except (ServerError, openai.OpenAIError, ReportError) as error:
        console.print(f"the demo stopped: {error}", style="red", markup=False)
        return 1
    finally:
        shutil.rmtree(trace)
    out = Console(file=sys.stdout)
    out.print(comparison(session, results))
    for name in results:
        out.print(summary(name, results[name]))
    out.print("\nWhat was dropped, turn by turn, in a browser:")
    out.print(f"  {report}", highlight=False, soft_wrap=True)
    out.print("\nOn a GPU, with your own model (`intentkv doctor -- FLAGS` says first whether it can be served there):")
    out.print(f"  {GPU_LINE}", highlight=False)
    return 0


def _play_on(name: str, model: Path, flags: list[str], session: Session, console: Console) -> list[TurnResult]:
    """One result a turn from a server of its own; a progress line each, since a turn takes seconds on a small machine."""
    log = cache_folder("demo") / f"{name}.log"
    results: list[TurnResult] = []
    start = time.monotonic()
    with console.status(f"{name}: starting") as status:

        def starting(seconds: float) -> None:
            status.update(f"{name}: starting, {seconds:.0f} s (log: {log})")

        console.print(f"{name}: sglang.launch_server {NAME} {' '.join(flags)}", highlight=False)
        with running_server(model, [*SMALL_POOL, *flags], log, starting) as server:
            console.print(f"{name}: up after {time.monotonic() - start:.0f} s", highlight=False)
            try:
                for result in play(session, server.url):
                    results.append(result)
                    line = f"{name}: turn {len(results)} of {len(session.turns)}, {result.seconds:.1f} s"
                    console.print(line, highlight=False)
                    status.update(f"{name}: turn {len(results) + 1}")
            except openai.OpenAIError:
                console.print(tail(log), markup=False, highlight=False)
                raise
    return results


def comparison(session: Session, results: Results) -> Table:
    """A table with one row for each turn and server. Tokens are counted at the end of the turn."""
    table = Table(
        title=f"{session.name} on {NAME}",
        caption="tokens; seconds of wall time; age: turns since it was shown",
        padding=0,
    )
    for column in ("turn", "age", "server"):
        table.add_column(column, min_width=8 if column == "server" else len(column))
    for column in ("logical", "live", "dropped", "reused", "seconds"):
        table.add_column(column, justify="right", min_width=max(5, len(column)))
    table.add_column("answer", no_wrap=True, max_width=44, overflow="ellipsis")
    for number, turn in enumerate(session.turns):
        for name in results:
            result = results[name][number]
            logical, live, dropped, reused = _tokens(result)
            first = name == next(iter(results))
            mark = "[green]right[/]" if result.right else "[red]wrong[/]"
            table.add_row(
                str(number + 1) if first else "",
                str(turn.age) if first else "",
                name,
                *(f"{count:,}" for count in (logical, live, dropped, reused)),
                f"{result.seconds:.1f}",
                f"{mark} {result.answer.strip()!r}",
                end_section=not first,
            )
    return table


def summary(name: str, results: list[TurnResult]) -> str:
    """One line: right answers, time, and what is still read at the end."""
    right = sum(result.right for result in results)
    logical, live, _, _ = _tokens(results[-1])
    seconds = sum(result.seconds for result in results)
    return f"{name}: {right} of {len(results)} right in {seconds:.0f} s; {live:,} of {logical:,} tokens live at the end"


def _tokens(result: TurnResult) -> tuple[int, int, int, int]:
    """(logical, live, dropped, reused from the prefix cache); a stock server reads every token it has."""
    if result.intentkv is None:
        logical = result.prompt_tokens + result.completion_tokens
        return logical, logical, 0, result.cached_tokens
    told = result.intentkv
    return told["logical_tokens"], told["live_tokens"], told["dropped_tokens"], told["reused_prefix_tokens"]
