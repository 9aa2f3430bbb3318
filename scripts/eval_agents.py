"""Accuracy, memory and prefix reuse of scorers on agent sessions, against the full cache.

    python scripts/eval_agents.py --sessions 4 --scorers intent random      # some minutes on two cores
    python scripts/eval_agents.py --layouts reclaim mask as-published       # one server after the other
    python scripts/eval_agents.py --traces chats.jsonl --model Qwen/Qwen3-8B   # OpenAI chats or ToolBench
    python scripts/eval_agents.py --base-url http://host:30000              # a server that runs, intentkv's or another

Budgets are percent of the tokens that the sessions end with on the full cache, on average, and the same number of tokens for
all; system prompt, newest message and recent tail come on top, so look at what is live. What was played is noted in
OUT.journal, one session a line: the same command, started again after it was killed, goes on there, and ends with the same
file but for the times (`seconds`, `score_ms`). Ages are turns since an answer was shown.
"""

from __future__ import annotations

import argparse
import functools
import hashlib
import json
import signal
from contextlib import AbstractContextManager, ExitStack
from pathlib import Path

import openai
from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TaskID,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)

from intentkv.evals.agents_report import result_file, summaries, tables
from intentkv.evals.cache_folder import cache_folder
from intentkv.evals.client import server_url
from intentkv.evals.configurations import LAYOUTS, Configuration, by_layout, layout_flags
from intentkv.evals.journal import Journal
from intentkv.evals.model import NAME, model_path
from intentkv.evals.plan import add_session_arguments, planned_sessions
from intentkv.evals.provenance import commit
from intentkv.evals.runner import play_all
from intentkv.evals.server import SMALL_POOL, Server, ServerError, running_server
from intentkv.evals.sessions import Session
from intentkv.score.registry import SCORERS

console = Console(stderr=True)
# What servers do by default, and the published baselines. The other scorers are for ablations, or need more flags.
COMPARED = [
    "intent",
    "streaming",
    "snapkv",
    "h2o",
    "keydiff",
    "expected-attention",
    "r-kv",
    "random",
    "random-sentence",
]


def main() -> int:
    arguments = parsed()
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # stopped by `kill` as by Ctrl-C: the server stops first
    configurations = by_layout(arguments.scorers, arguments.budgets, arguments.layouts)
    names = ("families", "sessions", "seed", "scorers", "budgets", "layouts", "trigger", "together", "base_url")
    plan = {name: getattr(arguments, name) for name in names}
    plan["traces"] = hashlib.sha256(arguments.traces.read_bytes()).hexdigest() if arguments.traces else None
    plan |= {"model": arguments.model_name if arguments.base_url else (arguments.model or NAME), "commit": commit()}
    try:
        sessions = planned_sessions(arguments)
        journal = Journal(arguments.out.with_suffix(".journal"), plan)
        play_everything(arguments, configurations, sessions, journal)
    except KeyboardInterrupt:
        console.print("interrupted; the same command goes on from here")
        return 130
    except (ServerError, openai.APIConnectionError, ValueError, RuntimeError) as error:
        console.print(f"the evaluation stopped: {error}", style="red", markup=False)
        return 1
    result = result_file(plan, journal.plays)
    arguments.out.write_text(json.dumps(result, indent=1) + "\n")
    out = Console(width=max(console.width, 130))  # the tables are wider than what a pipe passes for
    for table in tables(result["summary"]):
        out.print(table)
    console.print(f"written to {arguments.out}", highlight=False)
    if arguments.json:
        print(json.dumps(summaries(journal.plays)))
    return 0


def parsed() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_session_arguments(parser, sessions=12, seed=300)
    parser.add_argument(
        "--scorers", nargs="*", choices=list(SCORERS), default=COMPARED, help=f"default: {' '.join(COMPARED)}"
    )
    parser.add_argument("--budgets", nargs="+", type=percent, default=[50, 25, 12], help="percent (default: 50 25 12)")
    parser.add_argument("--layouts", nargs="+", choices=LAYOUTS, default=["reclaim"], help="default: reclaim")
    parser.add_argument("--trigger", type=int, default=64, help="--intentkv-trigger of the servers (default: 64)")
    parser.add_argument("--together", type=int, default=1, help="sessions at once (default: 1)")
    parser.add_argument("--model", help=f"model folder or name for the servers (default: {NAME})")
    parser.add_argument(
        "--base-url",
        type=server_url,
        help="a running server (http://host:port) instead; its layout is that of --layouts",
    )
    parser.add_argument("--model-name", default="default", help="model field of the requests to --base-url")
    parser.add_argument("--out", type=Path, default=cache_folder("evals") / "agents.json", help="default: %(default)s")
    parser.add_argument("--json", action="store_true", help="print one JSON object as the last line")
    arguments = parser.parse_args()
    if arguments.base_url and len(arguments.layouts) > 1:
        parser.error(f"a server has one layout: give one of --layouts {' '.join(arguments.layouts)} with --base-url")
    return arguments


def percent(text: str) -> float:
    value = float(text.removesuffix("%"))
    if not 0 < value <= 100:
        raise argparse.ArgumentTypeError(f"expected a percentage above 0 and up to 100, got {text!r}")
    return value


def play_everything(
    arguments: argparse.Namespace,
    configurations: dict[str, list[Configuration]],
    sessions: list[Session],
    journal: Journal,
) -> None:
    """One server a layout, one after the other; a layout of which all is in the journal gets none."""
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    hour = 3600.0  # a play takes long: the estimate of what remains is over the last hour of them
    with Progress(*columns, TimeRemainingColumn(), console=console, speed_estimate_period=hour) as progress:
        for layout, group in configurations.items():
            held = sum(journal.has(configuration.key, session.name) for configuration in group for session in sessions)
            task = progress.add_task(layout, total=len(group) * len(sessions), completed=held)
            if held == len(group) * len(sessions):
                continue
            with ExitStack() as stack:
                url = arguments.base_url or stack.enter_context(own_server(arguments, layout)).url
                shown = functools.partial(show_progress, progress, task)
                play_all(url, group, sessions, journal, arguments.model_name, shown, arguments.together)


def own_server(arguments: argparse.Namespace, layout: str) -> AbstractContextManager[Server]:
    """A server of `layout`; scorer and budget are named by each request."""
    flags = [
        *SMALL_POOL,
        "--enable-intentkv",
        *layout_flags(layout),
        "--intentkv-trigger",
        str(arguments.trigger),
    ]
    log = cache_folder("evals") / f"{layout}.log"
    console.print(f"starting a server for {layout} (log: {log})", highlight=False)
    return running_server(arguments.model or model_path(), flags, log)


def show_progress(progress: Progress, task: TaskID, configuration: str, session: str) -> None:
    progress.update(task, advance=1, description=f"{configuration} {session}")
    if not console.is_terminal:  # where no bar is drawn, a line in the log
        about = progress.tasks[task]
        left = "" if about.time_remaining is None else f", about {about.time_remaining / 60:.0f} min left"
        console.print(f"{about.completed:.0f} of {about.total:.0f}: {configuration} {session}{left}", highlight=False)


if __name__ == "__main__":
    raise SystemExit(main())
