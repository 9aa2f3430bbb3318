"""Real servers for the tests in this folder: SmolLM2 on whatever this machine has, one server alive at a time."""

import contextlib
from collections.abc import Iterator
from pathlib import Path

import pytest

from intentkv.evals.model import model_path
from intentkv.evals.server import SMALL_POOL, Server, running_server


class OneServer:
    """Hands out a server for a set of flags. The last one stays up until other flags are asked for.

    Two at once would slow each other down several times: an idle SGLang scheduler keeps a whole core busy. So tests
    that compare two servers ask one after the other, and tests of the same server belong next to each other.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._stack = contextlib.ExitStack()
        self._running: dict[tuple[Path, tuple[str, ...]], Server] = {}
        self._count = 0

    def get(self, *flags: str, model: Path | None = None) -> Server:
        """A server on `model` (SmolLM2 if None) with `flags`, started unless it is the one that runs.

        `flags` come after SMALL_POOL and beat it. Raises ServerError, with the end of the log, if it does not come up.
        """
        key = (model or model_path(), flags)
        if key not in self._running:
            self.stop()
            self._count += 1
            log = self._folder / f"server-{self._count}.log"
            server = running_server(key[0], [*SMALL_POOL, *flags], log)
            self._running[key] = self._stack.enter_context(server)
        return self._running[key]

    def stop(self) -> None:
        """Stops the server that runs, if any."""
        self._running.clear()
        self._stack.close()


@pytest.fixture(scope="session")
def servers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[OneServer]:
    one = OneServer(tmp_path_factory.mktemp("servers"))
    yield one
    one.stop()


@pytest.fixture
def stock_server(servers: OneServer) -> Server:
    """SGLang without intentkv."""
    return servers.get()


@pytest.fixture
def intentkv_server(servers: OneServer) -> Server:
    """SGLang with intentkv, a quarter of the history kept, and events as small as this folder's short sessions need."""
    return servers.get("--enable-intentkv", "--intentkv-budget", "25%", "--intentkv-trigger", "64", "--enable-metrics")
