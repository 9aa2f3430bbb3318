"""State of one request, from its creation to the end of its Req.

`Req.intentkv` is the only strong reference, so a finished, aborted or dropped request takes its state with it.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field

import numpy as np
from torch import Tensor

from intentkv.config import Budget
from intentkv.observe.query_mean import QueryMean
from intentkv.observe.session import SessionKey
from intentkv.observe.spans import Spans


@dataclass
class Pending:
    """Scores of one event, waiting for the checkpoint that applies it.

    scores: float32 [n] on the host, one a candidate; length, holes: the row when they were taken (tokens; positions).
    """

    scores: np.ndarray
    length: int
    holes: np.ndarray


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
    memory: Tensor | None = None  # M_t of this turn, [L, H_q, D], once the query span has been observed
    pending: Pending | None = None
    next_look: int = 0  # length at which a generation is looked at again for an event, tokens
    opened: float = field(default_factory=time.monotonic)  # when the scheduler took the request in, seconds
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
