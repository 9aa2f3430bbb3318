"""Where these tests run, and over what. On a GPU they need one and wait for it, one skip a test; with
INTENTKV_GPU_TESTS_ON=cpu the same tests run on our CPU backend, which proves the tests and not a GPU."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from intentkv.evals.model import tiny_checkpoint
from tests.e2e.conftest import OneServer
from tests.gpu.process import run_exact

ON_CPU = os.environ.get("INTENTKV_GPU_TESTS_ON") == "cpu"


@dataclasses.dataclass(frozen=True)
class Setup:
    """One way to start SGLang."""

    backend: str
    page_size: int
    graphs: bool
    overlap: bool

    @property
    def flags(self) -> list[str]:
        flags = ["--attention-backend", self.backend, "--page-size", str(self.page_size)]
        flags += [] if self.graphs else ["--disable-cuda-graph"]
        return flags + ([] if self.overlap else ["--disable-overlap-schedule"])

    def __str__(self) -> str:
        parts = [self.backend, f"page {self.page_size}", "graphs" if self.graphs else "no graphs"]
        return ", ".join([*parts, "overlap" if self.overlap else "no overlap"])


# Every backend with every page size with and without graphs; every two of the four choices meet.
PAIRS = ((1, True, True), (16, True, False), (16, False, True), (1, False, False))
ON_GPU = [Setup(backend, *rest) for backend in ("triton", "flashinfer", "fa3") for rest in PAIRS]
SETUPS = [Setup("intentkv_cpu", 16, graphs=False, overlap=True)] if ON_CPU else ON_GPU


WAITING = not ON_CPU and not torch.cuda.is_available()


@pytest.fixture(autouse=True)
def gpu(request: pytest.FixtureRequest) -> None:
    if WAITING:
        pytest.skip(f"waits for a GPU: {request.function.__name__}")


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random Qwen3 of two layers, with a head size that all kernels serve."""
    folder = tmp_path_factory.mktemp("model") / "qwen3"
    return tiny_checkpoint(folder, kind="qwen3", layers=2, heads=4, kv_heads=2, head_dim=128)


class Backends:
    """Whether SGLang by itself starts with an attention backend here; asked once each."""

    def __init__(self, model: Path, folder: Path) -> None:
        self._model, self._folder = model, folder
        self._known: dict[str, str | None] = {}

    def problem(self, backend: str) -> str | None:
        """What SGLang says against it, None if it starts."""
        if backend not in self._known:
            log = self._folder / f"probe-{backend}.log"
            found, end = run_exact(self._model, ["--probe", "--attention-backend", backend], log)
            self._known[backend] = None if found is not None else end.splitlines()[-1]
        return self._known[backend]


@pytest.fixture(scope="session")
def backends(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Backends:
    return Backends(model, tmp_path_factory.mktemp("probes"))


@pytest.fixture(scope="session", params=SETUPS, ids=str)  # for the session, so that tests of one setup come together
def setup(request: pytest.FixtureRequest) -> Setup:
    """A setup whose backend SGLang has on this machine; a backend that it has not is named."""
    wanted: Setup = request.param
    problem = None if WAITING else request.getfixturevalue("backends").problem(wanted.backend)
    if problem is not None:
        pytest.skip(f"SGLang alone does not start with {wanted.backend} on this machine: {problem}")
    return wanted


@pytest.fixture(scope="session")
def servers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[OneServer]:
    one = OneServer(tmp_path_factory.mktemp("servers"))
    yield one
    one.stop()
