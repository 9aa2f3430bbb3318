"""State of one request, from its creation to the end of its Req.

`Req.intentkv` is the only strong reference, so a finished, aborted or dropped request takes its state with it.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from torch import Tensor

from intentkv.config import Budget
from intentkv.observe.query_mean import QueryMean
from intentkv.observe.session import SessionKey
from intentkv.observe.spans import Spans


@dataclass(frozen=True)
class Pending:
    """One event's decision: nobody reads `drop` any more, and the next checkpoint frees it.

    drop: `[n]` int64, positions, ascending; length: tokens that the row had, all of them computed before the drop.
    """

    drop: np.ndarray
    length: int


@dataclass(frozen=True)
class Turn:
    """What a turn asks for, both `[L, H_q, D]` float32: Enc(q_t), and M_t, which the session's memory became with it."""

    query: Tensor
    memory: Tensor


@dataclass(eq=False)
class RequestState:
    """What intentkv knows of one request. The last five fields belong to the cache, which keeps them in step with the row."""

    key: SessionKey
    label: str
    scorer: str
    budget: Budget
    spans: Spans
    prompt_tokens: int
    query: QueryMean = field(default_factory=QueryMean)
    glimpse: QueryMean = field(default_factory=QueryMean)  # stands in for `query` at an event before it
    glimpse_from: int = 0  # position from which on tokens belong to the glimpse of the next event
    turn: Turn | None = None  # once the whole prompt has been observed
    pending: Pending | None = None
    goal: int = 0  # length that the prefill computes up to, tokens
    look: int = 0  # length at which the request is looked at next for an event, tokens
    events: int = 0
    score_ms: float = 0.0
    holes: np.ndarray = field(default_factory=lambda: np.empty(0, np.int64))
    dropped: int = 0
    freed: int = 0
    reused_prefix_tokens: int = 0

    @property
    def session(self) -> str:
        """The private key under which the cache files this session's survivors."""
        return self.key.value
