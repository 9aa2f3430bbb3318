"""What a running server says of itself: the audit of its scheduler's ranks in SGLang's `GET /server_info`."""

from __future__ import annotations

from typing import Any

from intentkv import __version__
from intentkv.engine import runtime


def add_to_internal_state(result: Any, controller: Any, request: Any) -> None:
    """After the scheduler has collected its internal state: add `intentkv` to it, with a full audit made now.

    Runs on the scheduler thread between two steps, where the ledger must hold with requests running too. The audit waits
    for the device and passes over the pool's tables, so it is made when somebody asks, not with every step. Every rank
    is asked, and the first answers for all of them.
    """
    active = runtime.current()
    faults = active.agreement.audit(active.cache.audit())
    result.internal_state["intentkv"] = {
        "version": __version__,
        "audit": faults,
        "ranks": active.ranks.size,
        "running": len(active.cache.rows),
        **{name: int(count) for name, count in active.cache.stats().items()},  # of Python's own: they leave as msgpack
    }
