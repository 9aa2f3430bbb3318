"""The `intentkv` command."""

from __future__ import annotations

import argparse

from intentkv import __version__


def main(argv: list[str] | None = None) -> int:
    """Run one subcommand; returns the exit code (0 fine, 1 refused or failed, 2 bad usage)."""
    parser = argparse.ArgumentParser(prog="intentkv", description="Session-aware KV cache pruning for SGLang.")
    parser.add_argument("--version", action="version", version=__version__)
    commands = parser.add_subparsers(dest="command", required=True)

    from intentkv.engine import doctor
    from intentkv.evals import demo

    examine = commands.add_parser("doctor", help="versions, hooks, and whether a server with these flags would start")
    doctor.add_arguments(examine)
    show = commands.add_parser("demo", help="the same agent session on a stock server and with intentkv")
    demo.add_arguments(show)

    arguments = parser.parse_args(argv)
    return doctor.run(arguments) if arguments.command == "doctor" else demo.run_demo(arguments)


if __name__ == "__main__":
    raise SystemExit(main())
