"""The full audit of who owns which slot, at idle in production: it costs a pass over the pool's tables, so not every time."""

from __future__ import annotations

import time
from typing import Any

from sglang.srt.environ import envs

from intentkv.engine import runtime

SECONDS_BETWEEN = 10.0

_last = 0.0


def audit_when_idle(result: None, checker: Any) -> None:
    """After SGLang's own check of the idle pool: audit the ledger, if requests have run since the last time.

    The clock decides only when this rank looks, never what any rank does.

    Raises:
        RuntimeError: a slot has no owner or two, listing every fault. Like SGLang's own idle check it ends the scheduler,
            since going on would hand one session's keys to another.
    """
    global _last
    active = runtime.current()
    if not active.unaudited or time.monotonic() - _last < SECONDS_BETWEEN:
        return
    active.unaudited, _last = 0, time.monotonic()
    faults = active.cache.audit()
    if faults:
        message = "the slot ledger is wrong:\n" + "\n".join(faults)
        if envs.SGLANG_ENABLE_STRICT_MEM_CHECK_DURING_IDLE.get():
            raise RuntimeError(message)
        runtime.logger.error(message)
