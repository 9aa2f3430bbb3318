"""Where a result comes from: what every file under docs/results/ says about itself."""

from __future__ import annotations

import os
import platform
import shlex
import subprocess
import sys
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

PACKAGES = ("intentkv", "sglang", "torch", "transformers")


def provenance(command: Sequence[str] | None = None) -> dict[str, Any]:
    """Command, commit, versions and machine; this process's own command by default."""
    script, *arguments = sys.argv if command is None else command
    return {
        "command": shlex.join(["python", _relative(script), *arguments]),
        "commit": commit(),
        "versions": {"python": platform.python_version(), **{name: package_version(name) for name in PACKAGES}},
        "machine": {"cpu": _processor(), "cores": os.cpu_count(), "system": platform.system(), **_gpu()},
    }


def commit() -> str | None:
    """The commit of the checkout that this file is in; None for an installed package.

    "-dirty" where tracked files differ from it, but for results, which benchmarks write one after the other.
    """
    try:
        head = _git("rev-parse", "--short=12", "HEAD")
        changed = _git("status", "--porcelain", "--untracked-files=no", "--", ":/", ":(top,exclude)docs/results")
    except (OSError, subprocess.CalledProcessError):
        return None
    return f"{head}-dirty" if changed else head


def _git(*arguments: str) -> str:
    root = Path(__file__).resolve().parents[2]
    command = ["git", "-C", str(root), *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()


def _relative(path: str) -> str:
    """`path` from the root of the checkout, so that no folder of this machine gets into a file."""
    root = Path(__file__).resolve().parents[2]
    full = Path(path).resolve()
    return str(full.relative_to(root)) if full.is_relative_to(root) else full.name


def package_version(name: str) -> str | None:
    """The installed version of `name`; None if it is not installed."""
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def _gpu() -> dict[str, str]:
    """The GPU's name, where there is one."""
    import torch

    return {"gpu": torch.cuda.get_device_name()} if torch.cuda.is_available() else {}


def _processor() -> str:
    """The processor's name as Linux gives it, else the architecture."""
    info = Path("/proc/cpuinfo")
    names = (
        [line.split(":", 1)[1].strip() for line in info.read_text().splitlines() if line.startswith("model name")]
        if info.exists()
        else []
    )
    return names[0] if names else platform.machine()
