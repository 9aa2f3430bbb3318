"""What a running server says of itself: its scheduler's audit in SGLang's `GET /server_info`."""

from __future__ import annotations

from typing import Any

from intentkv import __version__
from intentkv.engine import runtime


def add_to_internal_state(result: Any, controller: Any, request: Any) -> None:
    """After the scheduler has collected its internal state: add `intentkv` to it, with a full audit made now.

    Runs on the scheduler thread between two steps, where the ledger must hold with requests running too. The audit waits
    for the device and passes over the pool's tables, so it is made when somebody asks, not with every step.
    """
    cache = runtime.current().cache
    result.internal_state["intentkv"] = {
        "version": __version__,
        "audit": cache.audit(),
        "running": len(cache.rows),
        **{name: int(count) for name, count in cache.stats().items()},  # of Python's own: they leave as msgpack
    }
