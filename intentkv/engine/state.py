"""State of one request, from its creation to the end of its Req.

`Req.intentkv` is the only strong reference, so a finished, aborted or dropped request takes its state with it.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np
from torch import Tensor

from intentkv.config import Budget
from intentkv.engine.action_track import ActionTrack
from intentkv.observe.query_mean import QueryMean
from intentkv.observe.query_moments import QueryMoments
from intentkv.observe.query_window import QueryWindow
from intentkv.observe.session import SessionKey
from intentkv.observe.spans import Spans
from intentkv.score.base import Need

if TYPE_CHECKING:
    from intentkv.engine.collected import AttentionTap


@dataclass(frozen=True)
class Scored:
    """What an event has seen: scores `[n]` float32, one a candidate; `[length]` forced mask; `[h]` int64 holes until then."""

    scores: np.ndarray
    forced: np.ndarray
    holes: np.ndarray


@dataclass(frozen=True)
class Pending:
    """One event's decision, from its choice to the checkpoint that frees `drop`.

    A checkpoint files whole pages, and a request retracted after it computes the rest again. So nobody stops reading `drop`
    before the page of the newest token is full: all of that page is computed before the drop, whenever it is computed.

    drop: `[n]` int64, positions, ascending.
    chosen: tokens that the row had when they were chosen.
    length: tokens computed before the drop, the next whole page from `chosen` on.
    scored: what they were chosen by.
    """

    drop: np.ndarray
    chosen: int
    length: int
    scored: Scored


@dataclass(frozen=True)
class Turn:
    """What a turn asks for: Enc(q_t) and M_t, which the session's memory became with it, both `[L, H_q, D]` float32.

    covariance: of the queries that Enc(q_t) is the mean of, `[L, H_q, D, D]` float32. Each is None where the scorer needs none.
    """

    query: Tensor | None
    memory: Tensor | None
    covariance: Tensor | None


NO_TURN = Turn(None, None, None)


@dataclass(eq=False)
class RequestState:
    """What intentkv knows of one request. Four fields belong to the cache, which keeps them in step with the row: `holes`,
    `dropped`, `freed`, `reused_prefix_tokens`. `window` and `tap` are None where the scorer does not need them.
    """

    key: SessionKey
    label: str
    scorer: str
    budget: Budget
    spans: Spans
    prompt: np.ndarray  # int64 [prompt_tokens], token ids
    needs: frozenset[Need] = frozenset()  # of the scorer
    tap: AttentionTap | None = None
    query: QueryMean = field(init=False)
    glimpse: QueryMean = field(init=False)  # stands in for `query` at an event before it
    glimpse_from: int = 0  # position from which on tokens belong to the glimpse of the next event
    window: QueryWindow | None = field(init=False)
    predicted: int = -1  # position of the token whose surprise is known, though it has no slot yet
    measured: Tensor | None = None  # [n] float32 on the pool's device, surprise before a retraction, nats
    turn: Turn | None = None  # once the whole prompt has been observed
    action: ActionTrack | None = None  # for scorers that need keep scores
    pending: Pending | None = None
    goal: int = 0  # length that the prefill computes up to, tokens
    look: int = 0  # length at which the request is looked at next for an event, tokens
    opened: float = field(default_factory=time.monotonic)  # when the scheduler took the request in, seconds
    events: int = 0
    score_ms: float = 0.0
    holes: np.ndarray = field(default_factory=lambda: np.empty(0, np.int64))
    dropped: int = 0
    freed: int = 0
    reused_prefix_tokens: int = 0

    def __post_init__(self) -> None:
        self.query, self.glimpse = self.new_query(), self.new_query()
        self.window = QueryWindow() if "window" in self.needs else None

    def new_query(self) -> QueryMean:
        """An empty record of query rows, as the scorer needs it."""
        return QueryMoments() if "covariance" in self.needs else QueryMean()

    @property
    def prompt_tokens(self) -> int:
        return len(self.prompt)

    @property
    def session(self) -> str:
        """The private key under which the cache files this session's survivors."""
        return self.key.value
