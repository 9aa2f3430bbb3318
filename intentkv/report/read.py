"""Reads a trace. It is untrusted text: what does not fit is skipped, counted, and shown as a count with its reason."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO, Final

import numpy as np
from numpy.typing import NDArray

from intentkv.report import fields
from intentkv.report.fields import BadLine, Fields
from intentkv.trace.lines import VERSION

MAX_LINE_BYTES: Final = 64 * 2**20


class ReportError(Exception):
    """No report can be made; the text says why and what to do."""


@dataclass(frozen=True)
class Moment:
    """The pool at one time, in tokens; time in seconds since the epoch."""

    time: float
    free: int
    evictable: int


@dataclass(frozen=True)
class Event:
    """One event. scores `[length]` uint8 as the trace has them; drop `[length]` bool."""

    key: str
    rid: str
    moment: Moment
    length: int
    candidates: int
    dropped: int
    freed: int
    score_ms: float
    scores: NDArray[np.uint8]
    drop: NDArray[np.bool_]


@dataclass(frozen=True)
class Finish:
    """One finished request. Its text is the first `shared` tokens that its session has shown before, then `tokens`."""

    key: str
    rid: str
    session: str
    scorer: str
    budget: str
    moment: Moment
    prompt: int
    answer: int
    dropped: int
    freed: int
    reused: int
    reason: str
    score_ms: float
    seconds: float
    system: int
    query: tuple[int, int]
    holes: NDArray[np.bool_]
    shared: int
    tokens: NDArray[np.int32]
    actions: tuple[tuple[int, int], ...]
    confidence: NDArray[np.uint8] | None

    @property
    def length(self) -> int:
        return self.prompt + self.answer


@dataclass
class Trace:
    """What was read.

    Attributes:
        start: the fields of the first file's first line, for show; empty when there was none.
        pool_tokens: size of the pool, 0 when unknown.
        skipped: reason -> lines left out. lost: lines that the server itself could not write.
    """

    start: dict[str, str] = field(default_factory=dict)
    pool_tokens: int = 0
    events: list[Event] = field(default_factory=list)
    finished: list[Finish] = field(default_factory=list)
    skipped: Counter[str] = field(default_factory=Counter)
    lost: int = 0


def read_trace(path: Path) -> Trace:
    """Read one file, or all `*.jsonl` of a folder, the oldest first.

    Raises:
        ReportError: nothing there, not readable, of a newer version, or without one finished request.
    """
    trace = Trace()
    try:
        files = sorted(path.glob("*.jsonl"), key=lambda file: file.stat().st_mtime_ns) if path.is_dir() else [path]
        for file in files:
            with file.open("rb") as opened:
                _read_file(opened, trace)
    except OSError as error:
        raise ReportError(f"cannot read the trace: {error}") from error
    if not trace.finished:
        reasons = "; ".join(f"{lines} because {reason}" for reason, lines in trace.skipped.most_common(5))
        raise ReportError(
            f"{path} has no finished request to report; lines skipped: {trace.skipped.total()}"
            + (f" ({reasons})" if reasons else "")
            + ". Give a file or folder written by --intentkv-trace, after a request has finished."
        )
    return trace


def _read_file(file: BinaryIO, trace: Trace) -> None:
    lengths: dict[str, int] = {}  # session key -> tokens of it that this file has shown
    for data in _lines(file, trace):
        try:
            line = json.loads(data, parse_constant=_no_constant)
        except (ValueError, RecursionError):
            trace.skipped["it is not JSON"] += 1
            continue
        try:
            if not isinstance(line, dict):
                raise BadLine("it is not an object")
            _take(line, trace, lengths)
        except BadLine as reason:
            trace.skipped[str(reason)] += 1


def _lines(file: BinaryIO, trace: Trace) -> Iterator[bytes]:
    while data := file.readline(MAX_LINE_BYTES):
        if len(data) == MAX_LINE_BYTES and not data.endswith(b"\n"):
            trace.skipped[f"it is longer than {MAX_LINE_BYTES // 2**20} MiB"] += 1
            while data and not data.endswith(b"\n"):
                data = file.readline(MAX_LINE_BYTES)
        elif data.strip():
            yield data


def _no_constant(word: str) -> float:
    raise ValueError(f"{word} is not JSON")


def _take(line: dict[str, Any], trace: Trace, lengths: dict[str, int]) -> None:
    match line.get("kind"):
        case "start":
            _start(line, trace)
        case "event":
            trace.events.append(_event(line))
        case "finish":
            finish = _finish(line)
            if finish.shared > lengths.get(finish.key, 0):
                raise BadLine("the line that it continues is missing")
            lengths[finish.key] = finish.length
            trace.finished.append(finish)
        case "lost":
            trace.lost += fields.count(line, "lines")
        case _:
            raise BadLine("its kind is unknown")


def _start(line: Fields, trace: Trace) -> None:
    version = fields.count(line, "version")
    if version != VERSION:
        raise ReportError(
            f"the trace has format {version}, this intentkv reads {VERSION}: use the intentkv that wrote it"
        )
    pool = fields.count(line, "pool_tokens")
    if not trace.start:
        trace.pool_tokens = pool
        settings = fields.table(line, "settings")
        told = {
            name: line.get(name.replace(" ", "_"))
            for name in ("model", "intentkv", "sglang", "page size", "pool tokens")
        }
        told |= {key.replace("_", " "): value for key, value in list(settings.items())[:32]}
        trace.start = {key[:64]: str(value)[: fields.MAX_NAME] for key, value in told.items() if value is not None}


def _event(line: Fields) -> Event:
    length = fields.count(line, "length", fields.MAX_POSITIONS)
    return Event(
        key=fields.name(line, "key"),
        rid=fields.name(line, "rid"),
        moment=_moment(line),
        length=length,
        candidates=fields.count(line, "candidates"),
        dropped=fields.count(line, "dropped"),
        freed=fields.count(line, "freed"),
        score_ms=fields.number(line, "score_ms"),
        scores=fields.octets(line, "scores", length),
        drop=fields.bits(line, "drop", length),
    )


def _finish(line: Fields) -> Finish:
    prompt, answer = (fields.count(line, name, fields.MAX_POSITIONS // 2) for name in ("prompt", "answer"))
    length = prompt + answer
    shared, tokens = fields.count(line, "from"), fields.tokens(line, "tokens")
    if shared + len(tokens) != length:
        raise BadLine("its tokens do not add up to its length")
    spans, actions = fields.table(line, "spans"), line.get("actions", [])
    if not isinstance(actions, list):
        raise BadLine("'actions' is not a list")
    return Finish(
        key=fields.name(line, "key"),
        rid=fields.name(line, "rid"),
        session=fields.name(line, "session"),
        scorer=fields.name(line, "scorer", 64),
        budget=fields.name(line, "budget", 64),
        moment=_moment(line),
        prompt=prompt,
        answer=answer,
        dropped=fields.count(line, "dropped_tokens"),
        freed=fields.count(line, "freed_slots"),
        reused=fields.count(line, "reused_prefix_tokens"),
        reason=fields.name(line, "reason", 64),
        score_ms=fields.number(line, "score_ms"),
        seconds=fields.number(line, "seconds"),
        system=fields.count(spans, "system", length),
        query=fields.span(spans.get("query"), length, "query"),
        holes=fields.bits(line, "holes", length),
        shared=shared,
        tokens=tokens,
        actions=tuple(fields.span(action, length, "actions") for action in actions[:1000]),
        confidence=fields.octets(line, "confidence", answer) if "confidence" in line else None,
    )


def _moment(line: Fields) -> Moment:
    pool = fields.table(line, "pool")
    return Moment(fields.number(line, "time"), fields.count(pool, "free"), fields.count(pool, "evictable"))
