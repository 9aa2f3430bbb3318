"""State of one request, from its creation to the end of its Req.

`Req.intentkv` is the only strong reference, so a finished, aborted or dropped request takes its state with it.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np
from torch import Tensor

from intentkv.config import Budget
from intentkv.observe.query_mean import QueryMean
from intentkv.observe.query_moments import QueryMoments
from intentkv.observe.query_window import QueryWindow
from intentkv.observe.session import SessionKey
from intentkv.observe.spans import Spans
from intentkv.score.base import Need

if TYPE_CHECKING:
    from intentkv.engine.collected import AttentionTap


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
    """What intentkv knows of one request. Four fields belong to the cache, which keeps them in step with the row: `holes`,
    `dropped`, `freed`, `reused_prefix_tokens`. `query` and `window` are made by `observe_anew`; `window` and `tap` are None
    where the scorer does not need them.
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
    window: QueryWindow | None = field(init=False)
    memory: Tensor | None = None  # M_t of this turn, [L, H_q, D], once the query span has been observed
    pending: Pending | None = None
    next_look: int = 0  # length at which a generation is looked at again for an event, tokens
    events: int = 0
    score_ms: float = 0.0
    holes: np.ndarray = field(default_factory=lambda: np.empty(0, np.int64))
    dropped: int = 0
    freed: int = 0
    reused_prefix_tokens: int = 0

    def __post_init__(self) -> None:
        self.observe_anew()

    def observe_anew(self) -> None:
        """Forget what was observed: nothing was yet, or the request computes its tokens again."""
        self.query = self.new_query()
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
