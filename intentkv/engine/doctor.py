"""`intentkv doctor`: what is installed, what would be hooked, and whether a server would start; changes nothing."""

from __future__ import annotations

import argparse
import contextlib
import importlib.metadata
import io
import json
import platform as python_platform
from dataclasses import dataclass, field
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from intentkv.engine import inventory, support


@dataclass
class Verdict:
    """What doctor found; `reasons` empty means a server with these flags would start."""

    versions: dict[str, str]
    hooks: dict[str, str]
    backend: str
    reasons: list[str] = field(default_factory=list)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument(
        "server_flags",
        nargs=argparse.REMAINDER,
        help="flags as for the server, after `--`: -- --model-path M --intentkv-budget 25%%",
    )


def run(arguments: argparse.Namespace) -> int:
    flags = [flag for flag in arguments.server_flags if flag != "--"]
    verdict = examine(flags)
    if arguments.json:
        print(json.dumps({**vars(verdict), "can_serve": not verdict.reasons}))
    else:
        _print(verdict)
    return 1 if verdict.reasons else 0


def examine(flags: list[str]) -> Verdict:
    """Check hooks, platform and, where a model is given, the whole start up to the loading of weights."""
    names = ("intentkv", "sglang", "torch", "triton", "transformers")
    versions = {"python": python_platform.python_version()}
    versions |= {name: importlib.metadata.version(name) for name in names}
    rows = inventory.load_rows()
    reasons = inventory.problems_before(rows, inventory.load_pins(versions["sglang"]))
    hooks = {row.target: "fits" for row in rows}
    for row in rows:
        if any(row.target in reason for reason in reasons):
            hooks[row.target] = "does not fit"
    backend, backend_reasons = _default_backend()
    if not reasons:
        reasons += _dry_start(flags) if flags else backend_reasons
    return Verdict(versions, hooks, backend, reasons)


def _default_backend() -> tuple[str, list[str]]:
    from sglang.srt.platforms import current_platform

    device = "cuda" if torch.cuda.is_available() else current_platform.device_type
    if device != "cpu":  # SGLang chooses by model and GPU: a start with the server's flags shows it
        return f"chosen by SGLang for the model on {device}", []
    backend = current_platform.get_default_attention_backend()
    if backend in support.ATTENTION_BACKENDS:
        return f"{backend} on {device}", []
    served = ", ".join(support.ATTENTION_BACKENDS)
    reason = f"the attention backend would be {backend}, which does not read live views: intentkv serves {served}"
    return f"{backend} on {device}", [reason]


def _dry_start(flags: list[str]) -> list[str]:
    """Parse and resolve the flags as the server would; a refusal becomes its reasons."""
    from sglang.srt.plugins import load_plugins
    from sglang.srt.server_args import prepare_server_args

    complaints = io.StringIO()
    try:
        with contextlib.redirect_stderr(complaints):
            load_plugins()
            server_args: Any = prepare_server_args([*flags, "--enable-intentkv"])
            server_args.resolve_once()
    except SystemExit as refusal:
        text = refusal.code if isinstance(refusal.code, str) else complaints.getvalue().strip().splitlines()[-1]
        lines = [line.removeprefix("  - ") for line in text.splitlines()]
        return lines[1:] if len(lines) > 1 else lines
    except (ValueError, OSError) as error:
        return [f"SGLang refuses these flags itself: {error}"]
    return []


def _print(verdict: Verdict) -> None:
    console = Console()
    table = Table(title="intentkv doctor", show_header=False)
    for name, version in verdict.versions.items():
        table.add_row(name, version)
    table.add_row("attention", verdict.backend)
    console.print(table)
    hooks = Table("hook target", "state")
    for target, state in verdict.hooks.items():
        hooks.add_row(target.removeprefix("sglang.srt."), state)
    console.print(hooks)
    if verdict.reasons:
        console.print("[bold red]cannot serve[/bold red]:")
        for reason in verdict.reasons:
            console.print(f"  - {reason}", markup=False)
    else:
        console.print("[bold green]can serve[/bold green]: start with --enable-intentkv")
