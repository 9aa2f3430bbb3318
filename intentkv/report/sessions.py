"""From the lines of a trace to sessions: which text each turn brought, and what became of every token of it."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field
from typing import Final

import numpy as np
from numpy.typing import NDArray

from intentkv.apply.rows import common_prefix
from intentkv.report.read import Event, Finish, Trace
from intentkv.report.wanted import runs, wanted_positions
from intentkv.trace.lines import BEST

NO_SCORE: Final = 255
WANTED_WORK: Final = 50_000_000  # tokens looked through for later wants, all turns of a session together; seconds


@dataclass
class Block:
    """The text that one turn added, `[n]` tokens from position `start` on, and its fate up to the session's last turn.

    Attributes:
        turn: that turn.
        gone: `[n]` int32, turn in which it was dropped; 0 = never.
        left: `[n]` int32, turn whose prompt no longer had it (an edited history); 0 = never.
        score: `[n]` uint8, the last score, 0 to BEST; NO_SCORE where it was never a candidate.
        wanted: `[n]` int32, last turn that would have wanted it after it was dropped; 0 = none.
    """

    turn: int
    start: int
    tokens: NDArray[np.int32]
    gone: NDArray[np.int32] = field(init=False)
    left: NDArray[np.int32] = field(init=False)
    score: NDArray[np.uint8] = field(init=False)
    wanted: NDArray[np.int32] = field(init=False)

    def __post_init__(self) -> None:
        self.gone, self.left, self.wanted = (np.zeros(len(self.tokens), np.int32) for _ in range(3))
        self.score = np.full(len(self.tokens), NO_SCORE, np.uint8)


@dataclass(frozen=True)
class Want:
    """Dropped text that turn `turn` repeats: `tokens` from position `start` on, which turn `shown_in` brought and which was
    dropped in turn `gone`."""

    turn: int
    gone: int
    shown_in: int
    start: int
    tokens: NDArray[np.int32]


@dataclass
class Turn:
    """One finished request of a session, numbered from 1."""

    number: int
    finish: Finish
    block: Block
    events: list[Event]

    @property
    def live(self) -> int:
        return self.finish.length - int(self.finish.holes.sum())


@dataclass
class Session:
    """All finished requests under one private key, in the order in which they finished."""

    key: str
    turns: list[Turn] = field(default_factory=list)
    wants: list[Want] = field(default_factory=list)
    looked_for_wants: bool = True

    @property
    def name(self) -> str:
        return self.turns[-1].finish.session

    @property
    def tokens(self) -> int:
        """Tokens of text that its turns added."""
        return sum(len(turn.block.tokens) for turn in self.turns)


def build_sessions(trace: Trace, special: frozenset[int] = frozenset()) -> list[Session]:
    """Sessions in the order in which they first finished a request. `special`: token ids that are no text to be wanted."""
    events: dict[tuple[str, str], list[Event]] = defaultdict(list)
    for event in trace.events:
        events[event.key, event.rid].append(event)
    finished: dict[str, list[Finish]] = defaultdict(list)
    for finish in trace.finished:
        finished[finish.key].append(finish)
    return [_build(key, requests, events, special) for key, requests in finished.items()]


def _build(
    key: str, requests: list[Finish], events: dict[tuple[str, str], list[Event]], special: frozenset[int]
) -> Session:
    session = Session(key)
    session.looked_for_wants = sum(request.length for request in requests) <= WANTED_WORK
    path: list[Block] = []  # blocks whose text the current prompt still has; each is cut where the next begins
    text, shown = np.zeros(0, np.int32), np.zeros(0, np.int32)
    for number, finish in enumerate(requests, 1):
        # A file that begins anew repeats the text, so what the lines share is not what the turns share.
        shown = np.concatenate([shown[: finish.shared], finish.tokens])
        shared = common_prefix(text, shown)
        text = shown
        _leave(path, shared, number)
        block = Block(number, shared, text[shared:])
        path.append(block)
        own = [event for event in events.pop((key, finish.rid), []) if event.length <= finish.length]
        turn = Turn(number, finish, block, own)
        session.turns.append(turn)
        for event in own:
            _mark(path, event.scores, event.drop, number)
        _mark(path, np.zeros(0, np.uint8), finish.holes, number)
        if session.looked_for_wants and finish.holes.any():
            _note_wants(session, path, turn, text, special)
    return session


def _leave(path: list[Block], shared: int, number: int) -> None:
    """The prompt of turn `number` has only the first `shared` tokens of what the path holds."""
    while path and path[-1].start >= shared:
        path.pop().left[:] = number
    if path:
        last = path[-1].left[shared - path[-1].start :]
        last[last == 0] = number


def _spans(path: list[Block]) -> list[tuple[Block, int, int]]:
    """(block, start, end) of what the path still has of each block."""
    ends = [block.start for block in path[1:]] + [path[-1].start + len(path[-1].tokens)]
    return [(block, block.start, end) for block, end in zip(path, ends, strict=True)]


def _mark(path: list[Block], scores: NDArray[np.uint8], drop: NDArray[np.bool_], number: int) -> None:
    for block, start, end in _spans(path):
        part = scores[start:end]
        np.copyto(block.score[: len(part)], part, where=part <= BEST)
        gone = block.gone[: max(0, min(end, len(drop)) - start)]
        gone[drop[start : start + len(gone)] & (gone == 0)] = number


def _note_wants(
    session: Session, path: list[Block], turn: Turn, text: NDArray[np.int32], special: frozenset[int]
) -> None:
    finish = turn.finish
    wanted = wanted_positions(text, finish.holes, finish.query, finish.prompt, special)
    found: list[Want] = []
    for block, start, end in _spans(path):
        part = wanted[start:end]
        block.wanted[: len(part)][part] = turn.number
        for first, last in runs(part):
            gone = int(block.gone[first:last].max())
            found.append(Want(turn.number, gone, block.turn, start + first, text[start + first : start + last]))
    # Said twice in a record it is wanted once, and with its surroundings rather than without.
    said: list[bytes] = []
    for want in sorted(found, key=lambda want: -len(want.tokens)):
        words = want.tokens.tobytes()
        if not any(words in longer for longer in said):
            said.append(words)
            session.wants.append(want)
