"""Which sessions an evaluation plays: the arguments that say so, shared by the scripts."""

from __future__ import annotations

import argparse

from intentkv.evals.families import FAMILIES
from intentkv.evals.sessions import Session, make_session


def add_session_arguments(parser: argparse.ArgumentParser, seeds: str) -> None:
    """Adds `--families`, `--seeds` (with its default) and the sizes of the sessions to `parser`."""
    parser.add_argument("--families", nargs="+", choices=sorted(FAMILIES), default=list(FAMILIES), help="default: all")
    parser.add_argument("--seeds", type=seed_list, default=seeds, help=f"such as 3 or 3-5 or 3,8 (default: {seeds})")
    parser.add_argument("--records", type=int, default=5, help="turns that load a record (default: 5)")
    parser.add_argument("--late", type=int, default=5, help="turns after them that only ask (default: 5)")
    parser.add_argument("--filler", type=int, default=8, help="sentences of filler in a record (default: 8)")


def seed_list(text: str) -> list[int]:
    """`3-5,8` is [3, 4, 5, 8]. Raises ArgumentTypeError, which argparse turns into a usage message."""
    seeds: list[int] = []
    for part in text.split(","):
        first, _, last = part.partition("-")
        try:
            found = list(range(int(first), int(last or first) + 1))
        except ValueError:
            found = []
        if not found:
            raise argparse.ArgumentTypeError(f"expected seeds such as 3, 3-5 or 3,8, got {text!r}")
        seeds += found
    return seeds


def planned_sessions(arguments: argparse.Namespace) -> list[Session]:
    """The sessions that `arguments` ask for, each with one sub-agent and one answer that the client rewrites."""
    return [
        make_session(
            FAMILIES[family],
            seed,
            records=arguments.records,
            late=arguments.late,
            filler=arguments.filler,
            forks=1,
            rewrites=1,
        )
        for seed in arguments.seeds
        for family in arguments.families
    ]
