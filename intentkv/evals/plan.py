"""Which sessions an evaluation plays: the arguments that say so, shared by the scripts."""

from __future__ import annotations

import argparse
from pathlib import Path

from intentkv.evals.families import FAMILIES, SHORT_FACTS
from intentkv.evals.recorded import recorded_sessions
from intentkv.evals.sessions import Session, make_session


def add_session_arguments(parser: argparse.ArgumentParser, sessions: int, seed: int) -> None:
    """Adds `--families`, `--sessions`, `--seed` (with these defaults) and `--traces` to `parser`."""
    default = list(SHORT_FACTS)
    parser.add_argument(
        "--families", nargs="+", choices=sorted(FAMILIES), default=default, help=f"default: {' '.join(default)}"
    )
    parser.add_argument("--sessions", type=int, default=sessions, help="families in turn (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=seed, help="of each family's first session (default: %(default)s)")
    parser.add_argument("--traces", type=Path, help="JSONL of OpenAI chats or ToolBench, instead of generated sessions")


def planned_sessions(arguments: argparse.Namespace) -> list[Session]:
    """`arguments.sessions` sessions.

    Generated ones take the families in turn, and have one sub-agent and one answer that the client rewrites each.
    Raises ValueError for traces that have no session in them, or are none.
    """
    if arguments.traces:
        return recorded_sessions(arguments.traces, arguments.sessions)
    families = [FAMILIES[name] for name in arguments.families]
    return [
        make_session(families[n % len(families)], arguments.seed + n // len(families), forks=1, rewrites=1)
        for n in range(arguments.sessions)
    ]
