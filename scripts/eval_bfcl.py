"""BFCL v4 multi-turn on an OpenAI-compatible server: bfcl's cases, simulators and checker, for each scorer and budget.

    pip install 'intentkv[bfcl]'                       # in an environment of its own; see docs/evaluation.md
    python scripts/eval_bfcl.py --base-url http://host:30000 --scorers                # any server: only the full cache
    python scripts/eval_bfcl.py --base-url http://host:30000 --scorers intent snapkv --budgets 25% 2048 --together 16

The server must understand the model's calls (SGLang: --tool-call-parser). A budget is what a request can ask for: tokens of the
history, or a share of it; the tools' descriptions are in the system prompt, which always stays. What was played is noted in
OUT.journal, one case a line: the same command, started again after it was killed, goes on there.
"""

from __future__ import annotations

import argparse
import functools
import json
from pathlib import Path
from typing import Any

import openai
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from intentkv.evals.bfcl_cases import CATEGORIES, Case, load_cases
from intentkv.evals.bfcl_play import play_case
from intentkv.evals.bfcl_report import bfcl_result, bfcl_table
from intentkv.evals.cache_folder import cache_folder
from intentkv.evals.client import server_url
from intentkv.evals.configurations import FULL
from intentkv.evals.journal import Journal
from intentkv.evals.provenance import commit
from intentkv.evals.runner import play_missing

console = Console(stderr=True)


def main() -> int:
    arguments = parsed()
    names = ("base_url", "model_name", "categories", "cases", "scorers", "budgets", "max_tokens", "together")
    plan = {name: getattr(arguments, name) for name in names} | {"commit": commit()}
    try:
        cases = load_cases(arguments.categories, arguments.cases)
        journal = Journal(arguments.out.with_suffix(".journal"), plan)
        play_everything(arguments, cases, journal)
    except KeyboardInterrupt:
        console.print("interrupted; the same command goes on from here")
        return 130
    except (ImportError, openai.APIConnectionError, OSError, ValueError, RuntimeError) as error:
        console.print(f"the evaluation stopped: {error}", style="red", markup=False)
        return 1
    result = bfcl_result(plan, journal.plays)
    arguments.out.write_text(json.dumps(result, indent=1) + "\n")
    out = Console(width=max(console.width, 150))  # the table is wider than what a pipe passes for
    out.print(bfcl_table(result["summary"]))
    if not any(figures["calls"] for figures in result["summary"].values()):
        console.print("the model called no tool: does the server parse its calls (SGLang: --tool-call-parser)?")
    console.print(f"written to {arguments.out}", highlight=False)
    if arguments.json:
        print(json.dumps(result["summary"]))
    return 0


def parsed() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--base-url", type=server_url, required=True, help="http://host:port of a running server")
    parser.add_argument("--model-name", default="default", help="model field of the requests (default: %(default)s)")
    parser.add_argument(
        "--categories", nargs="+", choices=CATEGORIES, default=list(CATEGORIES), help="default: all four"
    )
    parser.add_argument("--cases", type=int, help="the first CASES of each category (default: all 200)")
    parser.add_argument("--scorers", nargs="*", default=["intent"], help="of the server; none: full cache only")
    parser.add_argument(
        "--budgets", nargs="+", default=["50%", "25%"], help="as a request gives them (default: 50%% 25%%)"
    )
    parser.add_argument("--max-tokens", type=int, default=4096, help="of an answer (default: %(default)s)")
    parser.add_argument("--together", type=int, default=1, help="cases at once (default: %(default)s)")
    parser.add_argument("--out", type=Path, default=cache_folder("evals") / "bfcl.json", help="default: %(default)s")
    parser.add_argument("--json", action="store_true", help="print one JSON object as the last line")
    return parser.parse_args()


def play_everything(arguments: argparse.Namespace, cases: list[Case], journal: Journal) -> None:
    """The full cache, then every scorer at every budget."""
    configurations: dict[str, dict[str, Any]] = {FULL: {"intentkv_enabled": False}}
    for scorer in arguments.scorers:
        for budget in arguments.budgets:
            asked = int(budget) if budget.isdigit() else budget
            configurations[f"{scorer}@{budget}"] = {"intentkv_scorer": scorer, "intentkv_budget": asked}
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, TimeRemainingColumn(), console=console, speed_estimate_period=3600.0) as progress:
        for key, params in configurations.items():
            held = sum(journal.has(key, case.name) for case in cases)
            task = progress.add_task(key, total=len(cases), completed=held)
            play = functools.partial(
                play_case,
                url=arguments.base_url,
                model=arguments.model_name,
                params=params,
                max_tokens=arguments.max_tokens,
            )
            shown = functools.partial(show_progress, progress, task)
            play_missing(arguments.base_url, key, key != FULL, cases, journal, play, shown, arguments.together)


def show_progress(progress: Progress, task: Any, configuration: str, case: str) -> None:
    progress.update(task, advance=1, description=f"{configuration} {case}")
    if not console.is_terminal:  # where no bar is drawn, a line in the log
        about = progress.tasks[task]
        console.print(f"{about.completed:.0f} of {about.total:.0f}: {configuration} {case}", highlight=False)


if __name__ == "__main__":
    raise SystemExit(main())
