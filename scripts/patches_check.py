"""Compare the inventory of hooks with the installed SGLang; `--write` records its pins after you have read every row.

python scripts/patches_check.py [--write]
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from rich.console import Console
from rich.table import Table

from intentkv.engine import inventory

PATCHES = Path(__file__).parent.parent / "patches"


def write_pins(version: str, rows: list[inventory.HookRow]) -> Path:
    path = PATCHES / f"sglang-{version}.toml"
    lines = [f"# Pins of SGLang {version}, written by scripts/patches_check.py --write.", ""]
    for row in rows:
        pin = inventory.take_pin(row)
        lines += [f'["{row.target}"]', f"signature = '''{pin.signature}'''", f'source = "{pin.source}"', ""]
    path.write_text("\n".join(lines), encoding="utf-8")
    return path


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true", help="record the installed SGLang's pins")
    arguments = parser.parse_args()
    version, rows = inventory.sglang_version(), inventory.load_rows()
    if arguments.write:
        print(f"wrote {write_pins(version, rows)}")
    pins = inventory.load_pins(version)
    problems = inventory.problems_before(rows, pins)
    drift = inventory.source_drift(rows, pins) if pins and not problems else []
    table = Table(title=f"{len(rows)} hooks against SGLang {version}")
    for column in ("target", "kind", "when", "state"):
        table.add_column(column, overflow="fold")
    for row in rows:
        at_fault = any(row.target in problem for problem in problems)
        state = "does not fit" if at_fault else "source differs, read it" if row.target in drift else "as pinned"
        table.add_row(row.target.removeprefix("sglang.srt."), row.kind, row.when, state)
    Console().print(table)
    for problem in problems:
        print(problem, file=sys.stderr)
    return 1 if problems or drift else 0


if __name__ == "__main__":
    raise SystemExit(main())
