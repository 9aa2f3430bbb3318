"""`tests.gpu.exact` in a process of its own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]


def run_exact(
    model: Path, flags: list[str], log: Path, module: str = "tests.gpu.exact", **environment: str
) -> tuple[dict[str, Any] | None, str]:
    """Its result, None where it failed, and the end of its output; all of that is in `log`."""
    command = [sys.executable, "-W", "ignore", "-m", module, "--model", str(model)]
    command += ["--max-total-tokens", "4096", "--max-running-requests", "8", *flags]
    with open(log, "w") as file:
        code = subprocess.run(
            command, check=False, cwd=ROOT, env={**os.environ, **environment}, stdout=file, stderr=file
        ).returncode
    lines = log.read_text(errors="replace").splitlines()
    return (json.loads(lines[-1]) if code == 0 else None), "\n".join(lines[-40:])


def assert_exact(result: dict[str, Any]) -> None:
    """Ours is as near to float64 as the backend itself is where nothing is dropped, and a drop changes far more than that."""
    print(json.dumps(result))
    for name, figures in result["figures"].items():
        assert figures["error"] <= 2 * figures["own_error"], name
        if name.endswith("pruned"):
            assert figures["effect"] > 10 * figures["error"], name
