"""From notes to lines of JSON, on the writer's thread. `docs/reading-the-report.md` describes the fields.

Token ids of a turn are written as the part that its session has not shown yet. What there is of one for each position is
base64: a bit for each (`bits`), or a byte for each (`scores`).
"""

from __future__ import annotations

import base64
import json
from collections import OrderedDict
from typing import Final

import numpy as np
from numpy.typing import NDArray

from intentkv.apply.rows import common_prefix
from intentkv.keep.select import candidates
from intentkv.trace.notes import EventNote, FinishNote, Note, Origin, Pool

VERSION: Final = 1
BEST: Final = 253  # byte of the best score; the worst is 0
DROPPED_BEFORE: Final = 254
FORCED: Final = 255
REMEMBERED_TOKENS: Final = 4 * 2**20  # of all sessions together, 16 MiB
REMEMBERED_SESSIONS: Final = 4096


class LineMaker:
    """Makes lines, and remembers of each session what the current file has shown of it. One thread only."""

    def __init__(self) -> None:
        self._shown: OrderedDict[str, NDArray[np.int32]] = OrderedDict()
        self._turns: OrderedDict[str, int] = OrderedDict()
        self._remembered = 0

    def begin_file(self) -> None:
        """A new file must be readable alone: forget what the last one has shown."""
        self._shown.clear()
        self._remembered = 0

    def line(self, note: Note) -> bytes:
        """One line, with its line feed."""
        fields = self._event(note) if isinstance(note, EventNote) else self._finish(note)
        return encode(fields)

    def _event(self, note: EventNote) -> dict[str, object]:
        length, drop = len(note.forced), note.dropped
        return {
            "kind": "event",
            **_origin(note.origin),
            "turn": self._turns.get(note.origin.key, 0) + 1,
            "length": length,
            "candidates": len(note.scores),
            "dropped": len(drop),
            "kept": length - len(note.holes) - len(drop),
            "freed": note.freed,
            "score_ms": round(note.score_ms, 3),
            "pool": _pool(note.pool),
            "scores": _base64(score_bytes(note.scores, note.forced, note.holes)),
            "drop": bits(drop, length),
        }

    def _finish(self, note: FinishNote) -> dict[str, object]:
        key = note.origin.key
        tokens = np.concatenate([np.frombuffer(ids, np.int64) for ids in (note.prompt, note.answer)]).astype(np.int32)
        before = self._shown.get(key)
        shared = 0 if before is None else common_prefix(before, tokens)
        self._remember(key, tokens)
        turn = self._turns[key] = self._turns.pop(key, 0) + 1
        if len(self._turns) > REMEMBERED_SESSIONS:
            self._turns.popitem(last=False)
        fields: dict[str, object] = {
            "kind": "finish",
            **_origin(note.origin),
            "turn": turn,
            "prompt": len(note.prompt),
            "answer": len(note.answer),
            **{name: note.report[name] for name in _COUNTS},
            "reason": note.reason,
            "seconds": round(note.seconds, 3),
            "spans": {"system": note.spans.system_end, "query": list(note.spans.query)},
            "pool": _pool(note.pool),
            "holes": bits(note.holes, len(tokens)),
            "from": shared,
            "tokens": tokens[shared:].tolist(),
        }
        if note.actions:
            fields["actions"] = [list(span) for span in note.actions]
        if note.confidence is not None:
            fields["confidence"] = _base64(np.rint(note.confidence.clip(0, 1) * 255).astype(np.uint8))
        return fields

    def _remember(self, key: str, tokens: NDArray[np.int32]) -> None:
        self._remembered += len(tokens) - len(self._shown.pop(key, ()))
        self._shown[key] = tokens
        while self._remembered > REMEMBERED_TOKENS or len(self._shown) > REMEMBERED_SESSIONS:
            self._remembered -= len(self._shown.popitem(last=False)[1])


_COUNTS = (
    "events", "logical_tokens", "live_tokens", "dropped_tokens", "freed_slots", "reused_prefix_tokens", "score_ms",
)  # fmt: skip


def encode(fields: dict[str, object]) -> bytes:
    """One line of JSON in ASCII. Half a surrogate pair in a name stays an escape, so no name can break a line."""
    return json.dumps(fields, separators=(",", ":")).encode("ascii") + b"\n"


def score_bytes(scores: NDArray[np.float32], forced: NDArray[np.bool_], holes: NDArray[np.int64]) -> NDArray[np.uint8]:
    """`[length]` uint8: a candidate's byte says which share of the candidates scored lower, 0 to BEST; equal scores are
    equal. Ranks, because scorers differ in unit and spread, and may say infinity."""
    values = np.full(len(forced), FORCED, np.uint8)
    values[holes[holes < len(forced)]] = DROPPED_BEFORE
    lower = np.searchsorted(np.sort(scores), scores)
    values[candidates(forced, holes)] = lower * BEST // max(1, len(scores) - 1)
    return values


def bits(positions: NDArray[np.int64], length: int) -> str:
    """A bit for each of `length` positions, set where listed: base64, the first position in the highest bit."""
    mask = np.zeros(length, np.bool_)
    mask[positions[positions < length]] = True
    return _base64(np.packbits(mask))


def _base64(values: NDArray[np.uint8]) -> str:
    return base64.b64encode(values.tobytes()).decode("ascii")


def _origin(origin: Origin) -> dict[str, object]:
    return {
        "time": round(origin.time, 3),
        "rid": origin.rid[:128],
        "session": origin.session,
        "key": origin.key[:16],
        "scorer": origin.scorer,
        "budget": origin.budget,
    }


def _pool(pool: Pool) -> dict[str, int]:
    return {"free": pool.free, "evictable": pool.evictable}
