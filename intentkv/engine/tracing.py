"""From the scheduler to the trace: what an event decided and what a request came to, handed over and not waited for."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from sglang.srt.managers.utils import is_health_check_generate_req

from intentkv import __version__
from intentkv.config import Settings
from intentkv.engine import inventory, ranks
from intentkv.engine.state import RequestState, Scored
from intentkv.trace.files import RotatingFile
from intentkv.trace.lines import VERSION
from intentkv.trace.notes import EventNote, FinishNote, Origin, Pool
from intentkv.trace.writer import TraceWriter


class Trace(Protocol):
    """What is told; `NoTrace` ignores it, so call sites never ask whether a trace is written."""

    def decided(self, scored: Scored) -> None:
        """What the drop was decided by that is applied next, on this thread."""

    def applied(self, req: Any, dropped: np.ndarray, freed: int) -> None:
        """The drop was applied: positions `[d]` int64, and slots given back."""

    def finished(self, req: Any, state: RequestState, report: dict[str, Any]) -> None:
        """The request has its last token; `report` is what its answer says."""


class NoTrace:
    def decided(self, scored: Scored) -> None:
        pass

    def applied(self, req: Any, dropped: np.ndarray, freed: int) -> None:
        pass

    def finished(self, req: Any, state: RequestState, report: dict[str, Any]) -> None:
        pass


class FileTrace:
    """Builds notes of references and host-known counts; the writer's thread does the rest."""

    def __init__(self, writer: TraceWriter, cache: Any) -> None:
        self._writer = writer
        self._cache = cache
        self._decided: Scored | None = None

    def decided(self, scored: Scored) -> None:
        self._decided = scored

    def applied(self, req: Any, dropped: np.ndarray, freed: int) -> None:
        assert self._decided is not None, "the runtime decides every drop"
        scored, self._decided = self._decided, None
        state: RequestState = req.intentkv
        self._writer.offer(
            EventNote(
                origin=_origin(req, state),
                pool=self._pool(),
                forced=scored.forced,
                holes=scored.holes,
                scores=scored.scores,
                dropped=dropped,
                freed=freed,
                score_ms=state.score_ms,
            )
        )

    def finished(self, req: Any, state: RequestState, report: dict[str, Any]) -> None:
        if is_health_check_generate_req(req):
            return  # every few seconds, and nobody's session
        self._writer.offer(
            FinishNote(
                origin=_origin(req, state),
                pool=self._pool(),
                prompt=req.origin_input_ids[:],  # copies: an array that another thread looks into cannot grow
                answer=req.output_ids[:],
                spans=state.spans,
                holes=state.holes,
                report=report,
                reason=str(req.finished_reason.to_json()["type"]),
                seconds=time.monotonic() - state.opened,
            )
        )

    def _pool(self) -> Pool:
        return Pool(self._cache.token_to_kv_pool_allocator.available_size(), self._cache.evictable_size())


def _origin(req: Any, state: RequestState) -> Origin:
    return Origin(time.time(), req.rid, state.label, state.session, state.scorer, str(state.budget))


def create_trace(settings: Settings, scheduler: Any) -> Trace:
    """The trace of this scheduler. All ranks decide alike, so only the first of a group writes."""
    if settings.trace is None or not ranks.is_first():
        return NoTrace()
    header: dict[str, object] = {
        "kind": "start",
        "version": VERSION,
        "intentkv": __version__,
        "sglang": inventory.sglang_version(),
        "model": scheduler.server_args.model_path,
        "page_size": scheduler.page_size,
        "pool_tokens": scheduler.max_total_num_tokens,
        "settings": {name: value for name, value in settings.to_dict().items() if name != "trace"},
    }
    return FileTrace(TraceWriter(RotatingFile(Path(settings.trace)), header), scheduler.tree_cache)
