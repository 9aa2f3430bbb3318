"""Ranks must not drift apart: the same steps leave the same free list, rows and records, whatever the process or core."""

import hashlib
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from tests.host.pools import publish_settings
from tests.host.stories import Stage, text_of
from tests.host.test_reclaim import make_world

ROOT = Path(__file__).resolve().parents[2]


def digest(core: str, page_size: int) -> str:
    """Serve eight turns of six sessions in a pool that is too small for them, and hash the state after each."""
    publish_settings()
    stage = Stage(lambda **sizes: make_world(core, page_size, **sizes), pages=80)
    rng = np.random.default_rng(0)
    stage.world.decide = lambda req, length: stage.positions(np.flatnonzero(rng.random(length // page_size) < 0.1))
    texts = {f"session {i}": stage.words("system", 6) + stage.words(f"start {i}", 6) for i in range(6)}
    state = hashlib.sha256()
    for turn in range(8):
        for session, text in texts.items():
            req = stage.say(text, session)
            texts[session] = text_of(req) + stage.words(f"{session} turn {turn}", 5)
            state.update(np.ascontiguousarray(stage.world.allocator.get_all_free_pages().numpy()).tobytes())
            state.update(stage.world.pool.req_to_token.numpy().tobytes())
            state.update(repr((stage.world.found, stage.cache.stats())).encode())
            for record in stage.cache.records.of(session):
                state.update(
                    record.holes.tobytes() + repr([(s.name, s.end, s.ids.tolist()) for s in record.path]).encode()
                )
    assert stage.cache.stats()["namespaces_evicted"], "the pool was large enough for all: nothing was tested"
    return state.hexdigest()


@pytest.mark.parametrize("page_size", [1, 16])
def test_reclaim_replicas_agree(page_size: int) -> None:
    here = digest("rust", page_size)
    assert digest("rust", page_size) == here
    assert digest("python", page_size) == here, "the Rust and the Python tree leave different states"


def test_reclaim_does_not_depend_on_hash_seeds() -> None:
    here = digest("rust", 1)
    code = "from tests.host.test_reclaim_replicas import digest; print(digest('rust', 1))"
    environment = {**os.environ, "PYTHONHASHSEED": "12345", "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", code],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.split()[-1] == here
