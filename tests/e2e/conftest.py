"""Real servers for the tests in this folder: SmolLM2 on whatever this machine has, one server alive at a time."""

import contextlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from intentkv.evals.model import model_path, tiny_checkpoint
from intentkv.evals.server import SMALL_POOL, Server, running_server
from tests.e2e.agents import FLAGS, IMPATIENT, POOL, STORM, TURNS, agents, check_sound, play


class OneServer:
    """Hands out a server for a set of flags. The last one stays up until other flags are asked for.

    Two at once would slow each other down several times: an idle SGLang scheduler keeps a whole core busy. So tests
    that compare two servers ask one after the other, and tests of the same server belong next to each other.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._stack = contextlib.ExitStack()
        self._running: dict[tuple[object, ...], Server] = {}
        self._count = 0

    def get(self, *flags: str, model: Path | None = None, environment: Mapping[str, str] | None = None) -> Server:
        """A server on `model` (SmolLM2 if None) with `flags`, started unless it is the one that runs.

        `flags` come after SMALL_POOL and beat it; `environment` is added to that of the tests. Raises ServerError, with the
        end of the log, if it does not come up.
        """
        extra = environment or {}
        key = (model or model_path(), flags, *extra.items())
        if key not in self._running:
            self.stop()
            self._count += 1
            log = self._folder / f"server-{self._count}.log"
            with pytest.MonkeyPatch.context() as patch:
                for name, value in extra.items():
                    patch.setenv(name, value)
                server = running_server(model or model_path(), [*SMALL_POOL, *flags], log)
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


@pytest.fixture(scope="session")
def qwen3(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny random model whose answers depend on everything it reads."""
    return tiny_checkpoint(tmp_path_factory.mktemp("models") / "qwen3", kind="qwen3")


@pytest.fixture(scope="session")
def storm(servers: OneServer, qwen3: Path) -> Server:
    """A server that retracts requests for the sake of it, and checks its pool while it is busy."""
    return servers.get(*FLAGS, model=qwen3, environment=STORM)


@pytest.fixture
def calm(servers: OneServer, qwen3: Path) -> Server:
    """The same without retractions, with twice the pool, and short of patience."""
    return servers.get(*FLAGS, "--max-total-tokens", str(2 * POOL), model=qwen3, environment=IMPATIENT)


@pytest.fixture(scope="session")
def expected(storm: Server) -> list[list[tuple[Any, ...]]]:
    """What each of the agents says, turn by turn, when nothing goes wrong."""
    talks = agents("reference")
    play(storm, talks, TURNS)
    check_sound(storm)
    assert all(talk.answers[-1].report["dropped_tokens"] > 0 for talk in talks[:4])
    assert all(talk.answers[-1].report["dropped_tokens"] == 0 for talk in talks[4:])
    return [talk.proofs() for talk in talks]
