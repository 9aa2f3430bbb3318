"""The `intentkv` command."""

from __future__ import annotations

import argparse
import sys
from importlib import import_module
from typing import Final

from intentkv import __version__

# Imported when asked for: reading a report must not wait for SGLang.
COMMANDS: Final = {
    "doctor": ("intentkv.engine.doctor", "versions, hooks, and whether a server with these flags would start"),
    "demo": ("intentkv.evals.demo", "the same agent session on a stock server and with intentkv"),
    "report": ("intentkv.report.command", "a trace of --intentkv-trace as one HTML page"),
}


def main(argv: list[str] | None = None) -> int:
    """Run one subcommand; returns the exit code (0 fine, 1 refused or failed, 2 bad usage)."""
    given = sys.argv[1:] if argv is None else argv
    parser = argparse.ArgumentParser(prog="intentkv", description="Session-aware KV cache pruning for SGLang.")
    parser.add_argument("--version", action="version", version=__version__)
    commands = parser.add_subparsers(dest="command", required=True)
    for name, (module, text) in COMMANDS.items():
        command = commands.add_parser(name, help=text)
        if name in given[:1]:
            chosen = import_module(module)
            chosen.add_arguments(command)
            command.set_defaults(run=chosen.run)
    arguments = parser.parse_args(given)
    return int(arguments.run(arguments))


if __name__ == "__main__":
    raise SystemExit(main())
