"""What the scheduler hands to the trace: references and plain numbers, so that handing over costs it microseconds."""

from __future__ import annotations

from array import array
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from intentkv.observe.spans import Spans


@dataclass(frozen=True)
class Pool:
    """The KV pool at one moment, in tokens: on the free list, and held by the tree for nobody who runs."""

    free: int
    evictable: int


@dataclass(frozen=True)
class Origin:
    """Which request of which session a note is about.

    Attributes:
        time: seconds since the epoch.
        rid: the request. session: the name that the answer reports. key: the private session key, which also tells
            equal names under different salts apart.
        scorer, budget: those of the request.
    """

    time: float
    rid: str
    session: str
    key: str
    scorer: str
    budget: str


@dataclass(frozen=True)
class EventNote:
    """One event, after it was applied.

    Attributes:
        forced: `[length]` bool, positions that no budget drops; length = logical tokens when they were scored.
        holes: `[m]` int64, positions dropped by earlier events.
        scores: `[n]` float32, one for each of `candidates(forced, holes)`.
        dropped: `[d]` int64, positions that this event dropped. freed: slots it gave back.
        score_ms: scoring time of the request so far.
    """

    origin: Origin
    pool: Pool
    forced: NDArray[np.bool_]
    holes: NDArray[np.int64]
    scores: NDArray[np.float32]
    dropped: NDArray[np.int64]
    freed: int
    score_ms: float

    @property
    def nbytes(self) -> int:
        """Bytes that waiting in the queue keeps alive, about."""
        return self.forced.nbytes + self.holes.nbytes + self.scores.nbytes + self.dropped.nbytes + 1024


@dataclass(frozen=True)
class FinishNote:
    """One finished request.

    Attributes:
        prompt, answer: token ids.
        holes: `[m]` int64, positions dropped so far.
        report: counts as in the answer's `meta_info["intentkv"]`.
        reason: how it finished, such as `stop`, `length` or `abort`.
        seconds: from the request's arrival at the scheduler to its end.
        actions: positions `[start, end)` of actions in the text, such as tool calls; none if nobody looked for them.
        confidence: probability of each answer token, 0 to 1; None if nobody looked.
    """

    origin: Origin
    pool: Pool
    prompt: array[int]
    answer: array[int]
    spans: Spans
    holes: NDArray[np.int64]
    report: Mapping[str, object]
    reason: str
    seconds: float
    actions: tuple[tuple[int, int], ...] = ()
    confidence: NDArray[np.float32] | None = None

    @property
    def nbytes(self) -> int:
        """Bytes that waiting in the queue keeps alive, about."""
        return 8 * (len(self.prompt) + len(self.answer)) + self.holes.nbytes + 2048


Note = EventNote | FinishNote
