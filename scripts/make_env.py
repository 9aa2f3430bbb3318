"""Builds the environment and prints its python: `python3 -m scripts.make_env`, run from the repository root.

Two layers. The packages of requirements.lock (11 GB) are one virtual environment in the cache folder, keyed by the lock
file and the Python version and shared by every clone. On top, each clone has a light `.venv` that sees those packages
and its own intentkv, installed editable so that SGLang finds the entry points. Standard library only.
"""

import hashlib
import os
import shutil
import subprocess
import sys
import threading
import time
import venv
from importlib.metadata import distributions
from pathlib import Path

from intentkv.evals.cache_folder import cache_folder, make_once

REPO = Path(__file__).resolve().parent.parent
LOCK = REPO / "requirements.lock"
NEEDED_GB = 18  # 11 GB installed, and the wheels beside them while pip unpacks


def main() -> None:
    if sys.version_info < (3, 11):  # noqa: UP036 (this runs on whatever python the machine has)
        sys.exit(f"intentkv needs Python 3.11 or newer, this is {sys.version.split()[0]}: `make env PYTHON=python3.11`")
    version = sys.version.split()[0]
    key = hashlib.sha256(LOCK.read_bytes() + version.encode()).hexdigest()[:12]
    shared = cache_folder("envs") / key
    make_once(shared, key, install_packages, say)
    sources = hashlib.sha256((REPO / "pyproject.toml").read_bytes()).hexdigest()[:12]
    make_once(REPO / ".venv", f"{REPO} {shared} {sources}", lambda folder: install_clone(folder, shared), say)
    print(REPO / ".venv/bin/python")


def install_packages(folder: Path) -> None:
    """Installs every package of the lock file into a new virtual environment at `folder`."""
    free = shutil.disk_usage(folder.parent).free / 1e9
    if free < NEEDED_GB:
        others = [str(path) for path in folder.parent.iterdir() if path.is_dir()]
        sys.exit(
            f"the environment needs {NEEDED_GB} GB free at {folder.parent} while it installs, there are {free:.0f}: "
            f"free some, or set XDG_CACHE_HOME to a larger disk. Environments of older lock files: {others or 'none'}"
        )
    names = [line for line in LOCK.read_text().splitlines() if line and not line.startswith("#")]
    say(f"installing {len(names)} packages into {folder}, once for all clones (11 GB, about 5 minutes)")
    venv.create(folder, with_pip=True, symlinks=True)
    run_pip(folder, ["--no-deps", "--only-binary", ":all:", "-r", str(LOCK)], packages=len(names))


def install_clone(folder: Path, shared: Path) -> None:
    """Makes the clone's own layer: the packages of `shared`, seen through a .pth file, and intentkv editable."""
    say(f"linking {folder} to the packages in {shared}")
    venv.create(folder, symlinks=True)
    # addsitedir rather than the bare path: it also reads the .pth files that packages of the lock install.
    line = f"import site; site.addsitedir({str(site_packages(shared))!r})\n"
    (site_packages(folder) / "intentkv_packages.pth").write_text(line)
    run_pip(folder, ["--no-deps", "--no-index", "--no-build-isolation", "-e", str(REPO)], packages=1)
    # The shared environment's commands, `sglang` above all, run the shared python, which knows no clone's intentkv.
    for distribution in distributions(path=[str(site_packages(shared))]):
        for entry in distribution.entry_points.select(group="console_scripts"):
            command = folder / "bin" / entry.name
            lines = [f"#!{folder}/bin/python", "import sys", f"from {entry.module} import {entry.attr} as run"]
            # Guarded, since processes that SGLang spawns read their parent's main file again.
            lines += ['if __name__ == "__main__":', "    sys.exit(run())", ""]
            command.write_text("\n".join(lines))
            command.chmod(0o755)


def run_pip(folder: Path, arguments: list[str], packages: int) -> None:
    """Runs `pip install` in environment `folder`, its output in a log; shows progress and, on failure, the log's end."""
    log = folder / "install.log"
    done = threading.Event()
    watcher = threading.Thread(target=show_progress, args=(folder, log, packages, done))
    watcher.start()
    try:
        with open(log, "w") as file:
            command = [str(folder / "bin/python"), "-m", "pip", "install", "--progress-bar", "off", *arguments]
            # close_fds=False: pip holds the lock too, so an orphaned pip is waited for, never raced.
            code = subprocess.run(
                command, check=False, stdout=file, stderr=subprocess.STDOUT, close_fds=False
            ).returncode
    finally:
        done.set()
        watcher.join()
    if code != 0:
        tail = "\n".join(log.read_text().splitlines()[-30:])
        sys.exit(f"{tail}\npip failed with status {code}; the whole log is {log}. Run the same command again to retry.")


def show_progress(folder: Path, log: Path, packages: int, done: threading.Event) -> None:
    start = time.monotonic()
    terminal = sys.stderr.isatty()
    while not done.wait(1 if terminal else 15):
        text = log.read_text() if log.exists() else ""
        fetched = text.count("\nCollecting ") + text.count("\nProcessing ")  # pip says the latter of wheels on disk
        installed = sum(1 for _ in site_packages(folder).glob("*.dist-info"))
        line = f"{time.monotonic() - start:4.0f} s: {fetched} of {packages} packages fetched, {installed} installed"
        say(line, end="\r" if terminal else "\n")
    if terminal:
        print(file=sys.stderr)


def site_packages(folder: Path) -> Path:
    return folder / f"lib/python{sys.version_info.major}.{sys.version_info.minor}/site-packages"


def say(line: str, end: str = "\n") -> None:
    print(f"intentkv: {line}", end=end, file=sys.stderr, flush=True)


if __name__ == "__main__":
    os.environ.setdefault("PIP_DISABLE_PIP_VERSION_CHECK", "1")
    try:
        main()
    except KeyboardInterrupt:
        sys.exit("\nintentkv: interrupted; run the same command again and it starts over from here")
