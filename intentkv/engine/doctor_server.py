"""`intentkv doctor --server URL`: asks a running server for the audit of its slots."""

from __future__ import annotations

import http.client
import json
import urllib.error
import urllib.request
from typing import Any, Final

from rich.console import Console
from rich.table import Table

ANSWER_SECONDS: Final = 60.0  # a scheduler answers between two steps; a long prefill is one step


def run(url: str, as_json: bool) -> int:
    """Print what the schedulers of the server at `url` say; 0 with no fault, 1 with any, or where none can be asked."""
    schedulers, reasons = examine_server(url)
    if as_json:
        print(json.dumps({"server": url, "schedulers": schedulers, "reasons": reasons}))
    else:
        _print(url, schedulers, reasons)
    return 1 if reasons else 0


def examine_server(url: str) -> tuple[list[dict[str, Any]], list[str]]:
    """`intentkv` of each scheduler (one a DP rank) of the server at `url`, and what is wrong, one line each."""
    address = f"{url.rstrip('/')}/server_info"
    try:
        with urllib.request.urlopen(address, timeout=ANSWER_SECONDS) as answer:
            said = json.load(answer)
    except urllib.error.HTTPError as error:
        return [], [f"{address} answered {error.code} {error.reason}: expected an SGLang server that lets us ask"]
    except (OSError, http.client.HTTPException, ValueError) as error:
        return [], [f"{address} cannot be asked ({error}): expected the http address of a running SGLang server"]
    states = said.get("internal_states") if isinstance(said, dict) else None
    if not states:
        return [], [f"{address} names no scheduler: expected an SGLang server, whose answer has internal_states"]
    schedulers, reasons = [], []
    for rank, state in enumerate(states):
        ours = state.get("intentkv")
        if ours is None:
            reasons.append(f"scheduler {rank} runs without intentkv: start the server with --enable-intentkv")
            continue
        schedulers.append(ours)
        reasons += [f"scheduler {rank}: {fault}" for fault in ours["audit"]]
    return schedulers, reasons


def _print(url: str, schedulers: list[dict[str, Any]], reasons: list[str]) -> None:
    console = Console()
    for rank, said in enumerate(schedulers):
        table = Table(title=f"intentkv on {url}, scheduler {rank}", show_header=False)
        for name, value in said.items():
            table.add_row(name.replace("_", " "), f"{len(value)} faults" if name == "audit" else str(value))
        console.print(table)
    for reason in reasons:
        console.print(f"  - {reason}", markup=False, highlight=False)
    verdict = "[bold red]not well[/bold red]" if reasons else "[bold green]every slot has one owner[/bold green]"
    console.print(verdict)
