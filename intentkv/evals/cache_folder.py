"""Where intentkv keeps what it makes once per machine, and how two processes agree on who makes it.

Standard library only and free of other intentkv imports: `scripts/make_env.py` uses it before anything is installed.
"""

import fcntl
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

Say = Callable[[str], None]  # takes one line of progress


def cache_folder(name: str) -> Path:
    """`$XDG_CACHE_HOME/intentkv/<name>` (or `~/.cache/intentkv/<name>`), created if missing."""
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    folder = Path(base) / "intentkv" / name
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def make_once(target: Path, made_from: str, build: Callable[[Path], None], say: Say) -> None:
    """Makes folder `target` by `build(target)` unless it was made whole before, from the same `made_from`.

    Any number of processes may call this at once: one builds, the others wait. What an interrupted build left, or a
    build from something else, is removed first. A marker written last is what says "whole"; the folder is not built
    elsewhere and renamed, because a virtual environment does not survive being moved.
    """
    marker = target / ".made-from"
    if _reads(marker, made_from):
        return
    with _locked(target.with_name(target.name + ".lock"), lambda: say(f"waiting for another process to make {target}")):
        if _reads(marker, made_from):
            return
        if target.exists():
            shutil.rmtree(target)
        build(target)
        marker.write_text(made_from)


def _reads(marker: Path, text: str) -> bool:
    return marker.exists() and marker.read_text() == text


@contextmanager
def _locked(path: Path, waiting: Callable[[], None]) -> Iterator[None]:
    """Holds an exclusive lock on `path` (created if missing); calls `waiting` once if another process has it.

    The kernel drops the lock when the last process that inherited it is gone: a killed build never blocks the next
    one, and a child that outlives its killed parent still counts as building.
    """
    with open(path, "w") as file:
        os.set_inheritable(file.fileno(), True)
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            waiting()
            fcntl.flock(file, fcntl.LOCK_EX)
        yield
