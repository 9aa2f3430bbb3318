"""What the page shows: plain values for the template, which only lays them out."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby, pairwise
from typing import Final

import numpy as np
from numpy.typing import NDArray

from intentkv.report.charts import Chart, chart
from intentkv.report.read import Event, ReportError, Trace
from intentkv.report.sessions import NO_SCORE, Block, Session, Turn, Want, build_sessions
from intentkv.report.text import Decoder, visible
from intentkv.trace.lines import BEST

TEXT_TOKENS: Final = 100_000  # of all sessions together; a page with more is slow to open
SESSIONS_LISTED: Final = 500
SCORE_STEPS: Final = 8


@dataclass(frozen=True)
class Run:
    """Tokens next to each other that have everything in common.

    Attributes:
        start, count: positions. gone, left, wanted: turns, 0 = none. score: step 0 to 7, None where never scored;
            percent: the share of candidates that scored lower. part: query, answer or other. action: in an action region.
        confidence: percent, None where unknown.
    """

    text: str
    start: int
    count: int
    gone: int
    left: int
    wanted: int
    score: int | None
    percent: int | None
    part: str
    action: bool
    confidence: int | None


@dataclass(frozen=True)
class TurnView:
    turn: Turn
    runs: list[Run]
    dropped: int
    confidence: int | None


@dataclass(frozen=True)
class WantView:
    """Dropped text that a turn repeats; `shown_in` is the turn under whose text the page has it."""

    gone: int
    start: int
    shown_in: int
    text: str


@dataclass(frozen=True)
class EventView:
    turn: int
    event: Event


@dataclass(frozen=True)
class SessionView:
    """A session with its text: `turns` is what the page shows, `all_turns` what it tabulates."""

    number: int
    name: str
    session: Session
    turns: list[TurnView]
    events: list[EventView]
    wants: list[tuple[int, list[WantView]]]  # turn, what it repeats
    chart: Chart
    last: Turn
    freed: int


@dataclass(frozen=True)
class Page:
    """Everything on the page. `others`: sessions without their text; `notes`: what the reader should know first."""

    start: dict[str, str]
    sessions: list[SessionView]
    others: list[Session]
    unlisted: int
    pool: Chart | None
    skipped: list[tuple[str, int]]
    lost: int
    span: str
    requests: int
    named: bool  # text rather than token ids


def build_page(trace: Trace, decoder: Decoder, only: str | None = None) -> Page:
    """The page of a trace; with `only`, of the sessions of that name.

    Raises:
        ReportError: no session is called so.
    """
    sessions = build_sessions(trace, decoder.special)
    if only is not None:
        names = sorted({session.name for session in sessions})
        sessions = [session for session in sessions if session.name == only]
        if not sessions:
            raise ReportError(f"--session: no session is called {only!r}; there are: {', '.join(names[:20])}")
    sessions.sort(key=lambda session: not session.turns[-1].finish.dropped)  # those that dropped something first
    told, others, room = [], [], TEXT_TOKENS
    for session in sessions:
        if session.tokens <= room:
            room -= session.tokens
            told.append(session)
        else:
            others.append(session)
    times = sorted(finish.moment.time for finish in trace.finished)
    clock = "%Y-%m-%d %H:%M:%S"
    return Page(
        start={key: visible(value) for key, value in trace.start.items()},
        sessions=[_session(number, session, decoder) for number, session in enumerate(told, 1)],
        others=others[:SESSIONS_LISTED],
        unlisted=max(0, len(others) - SESSIONS_LISTED),
        pool=_pool(trace),
        skipped=sorted(trace.skipped.items(), key=lambda item: -item[1])[:50],
        lost=trace.lost,
        span=f"{time.strftime(clock, _utc(times[0]))} to {time.strftime(clock, _utc(times[-1]))} UTC",
        requests=len(trace.finished),
        named=decoder.named,
    )


def _utc(seconds: float) -> time.struct_time:
    return time.gmtime(min(seconds, 2.0**33))  # a bad clock must not end the report


def _session(number: int, session: Session, decoder: Decoder) -> SessionView:
    turns, last = session.turns, session.turns[-1]
    return SessionView(
        number=number,
        name=visible(session.name),
        session=session,
        turns=[_turn(turn, decoder) for turn in turns],
        events=[EventView(turn.number, event) for turn in turns for event in turn.events],
        wants=[
            (turn, [_want(want, decoder) for want in wants]) for turn, wants in groupby(session.wants, lambda w: w.turn)
        ],
        chart=chart(
            [turn.number for turn in turns],
            {"logical": [turn.finish.length for turn in turns], "live": [turn.live for turn in turns]},
            "turn",
            [str(turn.number) for turn in turns],
        ),
        last=last,
        freed=sum(turn.finish.freed for turn in turns),
    )


def _want(want: Want, decoder: Decoder) -> WantView:
    return WantView(want.gone, want.start, want.shown_in, "".join(decoder.pieces(want.tokens.tolist())).strip())


def _turn(turn: Turn, decoder: Decoder) -> TurnView:
    confidence = turn.finish.confidence
    mean = None if confidence is None or not len(confidence) else round(float(confidence.mean()) / 2.55)
    return TurnView(turn, _runs(turn, decoder), sum(event.dropped for event in turn.events), mean)


def _runs(turn: Turn, decoder: Decoder) -> list[Run]:
    block, finish = turn.block, turn.finish
    n, start = len(block.tokens), block.start
    if not n:
        return []
    pieces = decoder.pieces(block.tokens.tolist())
    positions = np.arange(start, start + n)
    part = np.zeros(n, np.int64)
    part[(positions >= finish.query[0]) & (positions < finish.query[1])] = 1
    part[positions >= finish.prompt] = 2
    action = np.zeros(n, np.bool_)
    for begin, end in finish.actions:
        action |= (positions >= begin) & (positions < end)
    confidence = _confidence(turn, positions)
    step = np.where(block.score == NO_SCORE, -1, block.score.astype(np.int64) * SCORE_STEPS // (BEST + 1))
    columns = np.stack([block.gone, block.left, block.wanted, step, part, action, confidence])
    changes = (columns[:, 1:] != columns[:, :-1]).any(axis=0)
    edges = [0, *(np.flatnonzero(changes) + 1).tolist(), n]
    return [
        _run(block, pieces, begin, end, int(step[begin]), int(part[begin]), bool(action[begin]), int(confidence[begin]))
        for begin, end in pairwise(edges)
    ]


def _run(
    block: Block, pieces: Sequence[str], begin: int, end: int, step: int, part: int, action: bool, confidence: int
) -> Run:
    return Run(
        text="".join(pieces[begin:end]),
        start=block.start + begin,
        count=end - begin,
        gone=int(block.gone[begin]),
        left=int(block.left[begin]),
        wanted=int(block.wanted[begin]),
        score=None if step < 0 else step,
        percent=None if step < 0 else round(100 * float(block.score[begin:end].mean()) / BEST),
        part=("other", "query", "answer")[part],
        action=action,
        confidence=None if confidence < 0 else confidence,
    )


def _confidence(turn: Turn, positions: NDArray[np.int64]) -> NDArray[np.int64]:
    """Percent for each position, rounded to tens so that runs stay long; -1 where unknown."""
    values = np.full(len(positions), -1, np.int64)
    told = turn.finish.confidence
    if told is not None:
        answer = positions >= turn.finish.prompt
        values[answer] = np.rint(told[positions[answer] - turn.finish.prompt] / 25.5).astype(np.int64) * 10
    return values


def _pool(trace: Trace) -> Chart | None:
    moments = [event.moment for event in trace.events] + [finish.moment for finish in trace.finished]
    moments.sort(key=lambda moment: moment.time)
    if not trace.pool_tokens:
        return None
    used = [max(0, trace.pool_tokens - moment.free - moment.evictable) for moment in moments]
    held = [max(0, trace.pool_tokens - moment.free) for moment in moments]
    return chart(
        [moment.time - moments[0].time for moment in moments],
        {"pool": [trace.pool_tokens] * len(moments), "with idle": held, "running": used},
        "seconds",
    )
