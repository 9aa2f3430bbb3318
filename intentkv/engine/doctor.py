"""`intentkv doctor`: what is installed, what would be hooked, and whether a server would start; changes nothing."""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import importlib.metadata
import io
import json
import os
import platform as python_platform
from dataclasses import dataclass
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from intentkv.engine import doctor_server, inventory, support
from intentkv.engine.memory_estimate import MemoryEstimate, ModelShape, examine_memory


@dataclass
class Verdict:
    """What doctor found; `reasons` empty means a server with these flags would start.

    Attributes:
        environment, versions: of this machine, by name.
        sglang_range: what this intentkv asks for, and the versions whose hooks are pinned.
        hooks: target -> "fits", "fits, but its source differs from the pinned one", or "does not fit".
        backend: the attention backend that would be chosen, and the device.
        reasons: why a server with these flags would not start, and what to do.
        refuses: what no server starts with, whatever the model.
        model, memory: for the model that the flags name; None where `memory_note` says why.
    """

    environment: dict[str, str]
    versions: dict[str, str]
    sglang_range: str
    hooks: dict[str, str]
    backend: str
    reasons: list[str]
    refuses: list[str]
    model: ModelShape | None
    memory: MemoryEstimate | None
    memory_note: str


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--server", metavar="URL", help="audit the slots of a running server instead")
    parser.add_argument(
        "server_flags",
        nargs=argparse.REMAINDER,
        help="flags as for the server, after `--`: -- --model-path M --intentkv-budget 25%%",
    )


def run(arguments: argparse.Namespace) -> int:
    flags = [flag for flag in arguments.server_flags if flag != "--"]
    if arguments.server is not None:
        if flags:
            raise SystemExit(
                "intentkv doctor: expected --server or flags after `--`, got both: ask one question at a time"
            )
        return doctor_server.run(arguments.server, arguments.json)
    verdict = examine(flags)
    if arguments.json:
        print(json.dumps({**dataclasses.asdict(verdict), "can_serve": not verdict.reasons}))
    else:
        _print(verdict, asked=bool(flags))
    return 1 if verdict.reasons else 0


def examine(flags: list[str]) -> Verdict:
    """Check hooks, platform and, where a model is given, the whole start up to the loading of weights, and its memory."""
    names = ("intentkv", "sglang", "torch", "triton", "transformers")
    versions = {name: _version(name) for name in names}
    rows, pins = inventory.load_rows(), inventory.load_pins(versions["sglang"])
    reasons = inventory.problems_before(rows, pins)
    hooks = {row.target: "fits" for row in rows}
    for row in rows:
        if any(row.target in reason for reason in reasons):
            hooks[row.target] = "does not fit"
    if pins is not None:
        fitting = [row for row in rows if hooks[row.target] == "fits"]
        hooks |= dict.fromkeys(
            inventory.source_drift(fitting, pins), "fits, but its source differs from the pinned one"
        )
    allowed = os.environ.get("SGLANG_PLUGINS", "")
    if allowed and "intentkv" not in [name.strip() for name in allowed.split(",")]:
        reasons.append(f"SGLANG_PLUGINS={allowed} leaves intentkv out: add it, or unset the variable")
    backend, backend_reasons = _default_backend()
    if not reasons:
        reasons += _dry_start(flags) if flags else backend_reasons
    model, memory, note = examine_memory(flags)
    return Verdict(
        environment=_environment(),
        versions=versions,
        sglang_range=_sglang_range(),
        hooks=hooks,
        backend=backend,
        reasons=reasons,
        refuses=support.all_refusals(),
        model=model,
        memory=memory,
        memory_note=note,
    )


def _environment() -> dict[str, str]:
    gpus = [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    return {
        "python": python_platform.python_version(),
        "system": f"{python_platform.system()} {python_platform.machine()}",
        "processors": f"{os.cpu_count()}, {memory:.0f} GiB of memory",
        "GPUs": ", ".join(gpus) or "none",
    }


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "not installed"


def _sglang_range() -> str:
    """What intentkv's own metadata ask of SGLang, and what `patches/` has pins for."""
    wanted = [line.partition(";")[0].strip() for line in importlib.metadata.requires("intentkv") or []]
    asked = next(line.removeprefix("sglang") for line in wanted if line.startswith("sglang"))
    return f"{asked}; hooks pinned for {', '.join(inventory.pinned_versions())}"


def _default_backend() -> tuple[str, list[str]]:
    from sglang.srt.platforms import current_platform

    device = "cuda" if torch.cuda.is_available() else current_platform.device_type
    if device != "cpu":  # SGLang chooses by model and GPU: a start with the server's flags shows it
        return f"chosen by SGLang for the model on {device}", []
    try:
        backend = current_platform.get_default_attention_backend()
    except NotImplementedError:  # SGLang's base platform: nobody came forward for this machine
        variables = "SGLANG_PLATFORM, SGLANG_PLUGINS and SGLANG_USE_CPU_ENGINE"
        return "none", [f"no GPU, and intentkv's CPU platform is not chosen: unset {variables}"]
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


def _print(verdict: Verdict, asked: bool) -> None:
    console = Console()
    table = Table(title="intentkv doctor", show_header=False)
    for name, value in (verdict.environment | verdict.versions).items():
        table.add_row(name, value)
    table.add_row("SGLang wanted", verdict.sglang_range)
    table.add_row("attention", verdict.backend)
    if verdict.model is not None:
        model = verdict.model
        table.add_row(
            "model", f"{model.architecture}: {model.layers} layers, {model.kv_heads} KV heads of {model.head_dim}"
        )
        table.add_row("cache", f"{model.bytes_per_token:,} bytes a token, {model.context:,} tokens of context")
    console.print(table)
    hooks = Table("hook target", "state")
    for target, state in verdict.hooks.items():
        hooks.add_row(target.removeprefix("sglang.srt."), state)
    console.print(hooks)
    console.print(f"memory: {verdict.memory or verdict.memory_note}", markup=False, highlight=False)
    if not asked:
        console.print("refused with any model:")
        for reason in verdict.refuses:
            console.print(f"  - {reason}", markup=False, highlight=False)
    if verdict.reasons:
        console.print("[bold red]cannot serve[/bold red]:")
        for reason in verdict.reasons:
            console.print(f"  - {reason}", markup=False)
    else:
        console.print("[bold green]can serve[/bold green]: start with --enable-intentkv")
