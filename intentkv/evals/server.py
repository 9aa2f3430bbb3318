"""A real SGLang server as a context manager: started on a free loopback port, waited for, and stopped with all its children."""

import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

# One sequence of SmolLM2's whole context and room beside it: fits a small machine, and is the same on every one.
SMALL_POOL = ("--max-total-tokens", "16384", "--max-running-requests", "16")
START_SECONDS = 300.0  # a cold start reads several GB of libraries; a warm one takes about 20 s on two cores
STOP_SECONDS = 20.0


class ServerError(RuntimeError):
    """The server did not come up; the message ends with the tail of its log."""


@dataclass(frozen=True)
class Server:
    """A running server: `url` without a trailing slash, `pid` of its first process, `log` of all of them."""

    url: str
    pid: int
    log: Path


@contextlib.contextmanager
def running_server(
    model: Path,
    flags: Sequence[str],
    log: Path,
    waiting: Callable[[float], None] = lambda seconds: None,
    launcher: Sequence[str] = (sys.executable, "-m", "sglang.launch_server"),
) -> Iterator[Server]:
    """Starts `launcher` on `model` with `flags` and yields it once it answers /health.

    Start one at a time: an idle SGLang scheduler polls, and keeps a whole core busy. `waiting` is called about twice a
    second with the seconds since the start. On leaving, by whatever way, every process of the server is gone.

    Raises:
        ServerError: it exited or did not answer within START_SECONDS.
    """
    port = free_port()
    command = [*launcher, "--model-path", str(model)]
    command += ["--host", "127.0.0.1", "--port", str(port), *flags]
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "PYTHONUNBUFFERED": "1"}
    with open(log, "w") as file:
        # A session of its own: one signal reaches the server's children, and Ctrl-C reaches only us, who stop it in order.
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=file, stderr=file, env=environment, start_new_session=True
        )
    try:
        url = f"http://127.0.0.1:{port}"
        _wait_until_healthy(process, url, log, waiting)
        yield Server(url, process.pid, log)
    finally:
        stop_group(process)


def free_port() -> int:
    """A loopback port nobody listens on now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _wait_until_healthy(
    process: subprocess.Popen[bytes], url: str, log: Path, waiting: Callable[[float], None]
) -> None:
    start = time.monotonic()
    while not _healthy(url):
        seconds = time.monotonic() - start
        if process.poll() is not None:
            raise ServerError(f"the server exited with status {process.returncode} after {seconds:.0f} s\n{tail(log)}")
        if seconds > START_SECONDS:
            raise ServerError(f"the server did not answer {url}/health within {START_SECONDS:.0f} s\n{tail(log)}")
        waiting(seconds)
        time.sleep(0.5)


def _healthy(url: str) -> bool:
    """True once the server is up: /health answers 503 while it loads, and nothing listens before that."""
    try:
        with urllib.request.urlopen(f"{url}/health", timeout=10) as answer:
            return bool(answer.status == 200)
    except (urllib.error.URLError, ConnectionError, TimeoutError):
        return False


def tail(log: Path, lines: int = 60) -> str:
    """The last `lines` lines of `log`, under a line that names it."""
    text = log.read_text(errors="replace").splitlines()[-lines:]
    return "\n".join([f"--- end of {log}", *text])


def stop_group(process: subprocess.Popen[bytes]) -> None:
    """Ends `process`, the leader of its group, and all its children: asked to shut down, then killed."""
    process.terminate()
    try:
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(STOP_SECONDS)
    finally:  # also where a second Ctrl-C ends the wait
        with contextlib.suppress(ProcessLookupError):  # the good case: nothing of the group is left
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
