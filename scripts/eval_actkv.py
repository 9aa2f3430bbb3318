"""ActKV on a real server: sessions of tool calls, with the budget that follows the model's confidence, against others.

    python scripts/eval_actkv.py --sessions 3 --together 3       # a quarter of an hour on two cores
    python scripts/plot_results.py docs/results/actkv.json

The sessions of `eval_agents.py` without sub-agents and with more late questions, answered by calls that SGLang's constrained
decoding makes the model write (`intentkv.evals.calls`). The full cache and `actkv` with a budget of `auto` are played first; the mean of
that budget over all turns is then the fixed budget of `actkv` and of the others. Right is a call whose argument holds the value.
Started again after it was killed it goes on, as `eval_agents.py` does.
"""

from __future__ import annotations

import argparse
import json
import signal
from collections.abc import Sequence
from pathlib import Path

import openai
from rich.console import Console

from intentkv.evals.agents_report import result_file, tables
from intentkv.evals.cache_folder import cache_folder
from intentkv.evals.calls import tool_calling
from intentkv.evals.configurations import AUTO, Configuration
from intentkv.evals.families import FAMILIES
from intentkv.evals.journal import Journal, Play
from intentkv.evals.model import NAME, model_path
from intentkv.evals.provenance import commit
from intentkv.evals.runner import mean_final_tokens, play_all
from intentkv.evals.server import SMALL_POOL, ServerError, running_server
from intentkv.evals.sessions import Session, make_session

console = Console(stderr=True)
OTHERS = ("actkv", "snapkv", "streaming", "intent")
# In calls SmolLM2 knows hardly anything of the code reviews, even with nothing dropped (docs/actkv.md).
WORLDS = ("order-desk", "operations-log", "travel")
LATE = 20  # turns that only ask: a trend of the confidence needs some hundred tokens
FLAGS = ("--enable-intentkv", "--intentkv-scorer", "actkv", "--intentkv-budget", AUTO, "--intentkv-trigger", "64")
# Half of what the sessions end with: a budget beyond their history would drop nothing, and could be compared with nothing.
MOST = ("--intentkv-budget-max", "2048")
# SmolLM2's chat template knows no calls, so `auto` could not tell how they are written.
HERMES = ("--intentkv-action-template", "hermes")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sessions", type=int, default=3, help="families in turn (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=500, help="of each family's first session (default: %(default)s)")
    parser.add_argument("--together", type=int, default=1, help="sessions at once (default: 1)")
    parser.add_argument("--out", type=Path, default=cache_folder("evals") / "actkv.json", help="default: %(default)s")
    arguments = parser.parse_args()
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # stopped by `kill` as by Ctrl-C: the server stops first
    plan = {name: getattr(arguments, name) for name in ("sessions", "seed", "together")}
    plan |= {"families": list(WORLDS), "late": LATE, "model": NAME, "commit": commit()}
    journal = Journal(arguments.out.with_suffix(".journal"), plan)
    log = cache_folder("evals") / "actkv.log"
    console.print(f"starting a server (log: {log})", highlight=False)
    try:
        with running_server(model_path(), [*SMALL_POOL, *FLAGS, *MOST, *HERMES], log) as server:
            play_everything(server.url, planned(arguments.sessions, arguments.seed), journal, arguments.together)
    except KeyboardInterrupt:
        console.print("interrupted; the same command goes on from here")
        return 130
    except (ServerError, openai.APIConnectionError) as error:
        console.print(f"the evaluation stopped: {error}", style="red", markup=False)
        return 1
    result = {**result_file(plan, journal.plays), "kind": "actkv", "mean_budget": mean_budget(journal.plays)}
    arguments.out.write_text(json.dumps(result, indent=1) + "\n")
    out = Console(width=max(console.width, 130))
    for table in tables(result["summary"]):
        out.print(table)
    out.print(f"budget of auto, mean over turns: {result['mean_budget']:.0f} tokens; written to {arguments.out}")
    return 0


def planned(sessions: int, seed: int) -> list[Session]:
    worlds = [FAMILIES[name] for name in WORLDS]
    return [
        tool_calling(make_session(worlds[n % len(worlds)], seed + n // len(worlds), late=LATE)) for n in range(sessions)
    ]


def play_everything(url: str, sessions: list[Session], journal: Journal, together: int) -> None:
    def shown(configuration: str, session: str) -> None:
        console.print(f"{len(journal.plays)} of {(2 + len(OTHERS)) * len(sessions)}: {configuration} {session}")

    first = [Configuration(None, 100, "reclaim"), Configuration("actkv", AUTO, "reclaim")]
    play_all(url, first, sessions, journal, finished=shown, together=together)
    names = [session.name for session in sessions]
    percent = round(100 * mean_budget(journal.plays) / mean_final_tokens(journal, names), 1)
    others = [Configuration(scorer, percent, "reclaim") for scorer in OTHERS]
    play_all(url, others, sessions, journal, finished=shown, together=together)


def mean_budget(plays: Sequence[Play]) -> float:
    """The mean over all turns of what the budget of `auto` stood at, in tokens."""
    turns = [turn for play in plays if play["configuration"] == f"actkv@{AUTO}" for turn in play["turns"]]
    done = [turn["budget_tokens"] for turn in turns if turn["completed"]]
    return sum(done) / len(done)


if __name__ == "__main__":
    raise SystemExit(main())
