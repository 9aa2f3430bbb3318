"""Small traces for the tests of the report, written by the real writer."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from intentkv.keep.select import candidates
from intentkv.observe.spans import Spans
from intentkv.trace.files import RotatingFile
from intentkv.trace.notes import EventNote, FinishNote, Origin, Pool
from intentkv.trace.writer import TraceWriter

HEADER: dict[str, object] = {
    "kind": "start", "version": 1, "model": "tiny", "page_size": 1, "pool_tokens": 1000, "settings": {"budget": "50%"},
}  # fmt: skip


class Teller:
    """Tells the writer of sessions as the scheduler would; `clock` goes on by a second a note."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._writer = TraceWriter(RotatingFile(folder), HEADER)
        self._clock = 1_700_000_000.0
        self._rid = 0
        self._holes: dict[str, set[int]] = {}

    def turn(
        self,
        session: str,
        prompt: Sequence[int],
        answer: Sequence[int],
        *,
        query: tuple[int, int],
        drop: Sequence[int] = (),
        actions: tuple[tuple[int, int], ...] = (),
        confidence: Sequence[float] | None = None,
    ) -> None:
        """One request, with one event at the end of its prompt if `drop` has positions. The best score is the last one's."""
        self._rid += 1
        holes = self._holes.setdefault(session, set())
        before = np.array(sorted(holes), np.int64)
        if drop:
            forced = np.zeros(len(prompt), np.bool_)
            forced[:2] = forced[query[0] : query[1]] = True
            scores = np.arange(len(candidates(forced, before)), dtype=np.float32)
            gone = np.array(drop, np.int64)
            self._writer.offer(
                EventNote(self._origin(session), self._pool(), forced, before, scores, gone, len(drop), 1.5)
            )
            holes |= set(drop)
        length = len(prompt) + len(answer)
        report = {
            "events": int(bool(drop)), "logical_tokens": length, "live_tokens": length - len(holes),
            "dropped_tokens": len(holes), "freed_slots": len(drop), "reused_prefix_tokens": 0, "score_ms": 1.5,
        }  # fmt: skip
        self._writer.offer(
            FinishNote(
                self._origin(session), self._pool(), array("q", prompt), array("q", answer), Spans(2, query),
                np.array(sorted(holes), np.int64), report, "stop", 0.25, actions,
                None if confidence is None else np.array(confidence, np.float32),
            )
        )  # fmt: skip

    def close(self) -> Path:
        self._writer.close(30)
        (file,) = self.folder.iterdir()
        return file

    def _origin(self, session: str) -> Origin:
        self._clock += 1
        return Origin(self._clock, f"r{self._rid}", session, f"key of {session}"[:16], "intent", "50%")

    def _pool(self) -> Pool:
        return Pool(900 - 10 * self._rid, 50)
