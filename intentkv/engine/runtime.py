"""The scheduler's half: keeps memories and scorers, scores a request's history, decides what to drop.

observe (engine/observer.py) -> score (here, on the forward's stream) -> keep (here, at the next checkpoint)
-> apply (engine/cache.py, which calls `decide`).
"""

from __future__ import annotations

import logging
import time
import zlib
from typing import Any
from weakref import WeakValueDictionary

import numpy as np
import torch
from sglang.srt.runtime_context import get_observability
from torch import Tensor

from intentkv.apply.live_view import LiveViews
from intentkv.config import Settings
from intentkv.engine import activation
from intentkv.engine.chat_format import message_format
from intentkv.engine.metrics import create_metrics
from intentkv.engine.state import Pending, RequestState
from intentkv.keep.forced import forced_mask, whole_pages
from intentkv.keep.select import candidates, choose_drop, droppable
from intentkv.observe.query_mean import QueryMean
from intentkv.observe.spans import query_positions
from intentkv.score.base import ScoreInput, Scorer
from intentkv.score.memory import QueryMemory
from intentkv.score.registry import HEAD_SCORER, make_scorer

logger = logging.getLogger(__name__)

_runtime: Runtime | None = None


class Runtime:
    """One per scheduler process. `states` only looks requests up; each Req owns its state."""

    def __init__(self, settings: Settings, scheduler: Any) -> None:
        runner = scheduler.tp_worker.model_runner
        self.settings = settings
        self.states: WeakValueDictionary[str, RequestState] = WeakValueDictionary()
        self.running_plan: Any = None
        self.unaudited = 0  # requests opened since the ledger was last audited
        self.cache: Any = scheduler.tree_cache
        self.memory = QueryMemory(settings.memory_decay, settings.max_sessions)
        self.metrics = create_metrics(self.cache, get_observability().enable_metrics)
        self._scorers: dict[str, Scorer] = {}
        if settings.head is not None:
            self._scorer(HEAD_SCORER)  # now, since a file that is gone must stop the start, not a request
        self.format = message_format(scheduler.tokenizer, scheduler.server_args.chat_template)
        self._rows: Tensor = scheduler.req_to_token_pool.req_to_token
        self._pool = scheduler.token_to_kv_pool_allocator.get_kvcache()
        self.page_size: int = scheduler.page_size
        self._chunk: int | None = scheduler.chunked_prefill_size
        self._layers: int = runner.model_config.num_hidden_layers
        views = LiveViews(self._rows)
        self.cache.views = views
        self.cache.decide = self.decide
        self.cache.peak = self.peak
        self.cache.on_reset = self.memory.clear
        runner.attn_backend.views = views

    def score(self, state: RequestState, row: int, length: int, seen: QueryMean) -> None:
        """Score the live history of one request after a forward; keeps the result in `state.pending`.

        Args:
            row: row of `req_to_token`. length: logical tokens now in it. seen: the queries this forward observed.
        """
        begin = time.perf_counter()
        state.next_look = length + self.settings.trigger
        forced = self._forced(state, length)
        due = droppable(forced, state.holes, state.budget, self.settings.trigger) > 0
        turn_is_complete = length >= state.prompt_tokens
        if not due and not turn_is_complete:
            return
        query = (state.query or seen).mean()
        memory = self._memory_after(state, query, turn_is_complete)
        if not due:
            return
        positions = torch.from_numpy(candidates(forced, state.holes))
        asked = torch.from_numpy(query_positions(state.spans, length, state.holes))
        scores = self._scorer(state.scorer).score(
            ScoreInput(
                layer_keys=self._pool.get_key_buffer,
                slots=self._rows[row, positions.to(self._rows.device)].long(),
                positions=positions,
                memory=memory,
                query=query,
                seed=zlib.crc32(state.session.encode()),
                num_layers=self._layers,
                query_slots=self._rows[row, asked.to(self._rows.device)].long(),
            )
        )
        state.pending = Pending(scores.cpu().numpy(), length, state.holes)
        seconds = time.perf_counter() - begin
        state.score_ms += seconds * 1e3
        self.metrics.scored(seconds)

    def decide(self, req: Any, committed: int) -> np.ndarray:
        """Positions to drop now, int64 ascending; called by the cache at a checkpoint that covers `committed` tokens."""
        state: RequestState = req.intentkv
        pending, state.pending = state.pending, None
        # Scores of another row than this one say nothing about it: the row was computed again, or has other holes now.
        if pending is None or pending.length > committed or not np.array_equal(pending.holes, state.holes):
            return np.empty(0, np.int64)
        if np.isnan(pending.scores).any():
            logger.warning("request %s: its scores are not numbers, so nothing is dropped", req.rid)
            return np.empty(0, np.int64)
        forced = self._forced(state, pending.length)
        drop = choose_drop(pending.scores, forced, state.holes, state.budget, self.settings.trigger, self.page_size)
        state.events += len(drop) > 0
        return drop

    def _forced(self, state: RequestState, length: int) -> np.ndarray:
        return whole_pages(forced_mask(length, state.spans, self.settings.recent), self.page_size)

    def peak(self, req: Any, length: int) -> int:
        """Most live tokens of `req` while its first `length` tokens are computed in chunks with an event after each.

        What is always kept, the budget, what is too little for an event, and one chunk; pages may be cut on both sides.
        """
        state: RequestState = req.intentkv
        forced = int(self._forced(state, length).sum())
        kept = forced + state.budget.tokens(length - forced) + self.settings.trigger - 1
        return kept + self._chunk + 2 * self.page_size if self._chunk else length

    def _memory_after(self, state: RequestState, query: Tensor, turn_is_complete: bool) -> Tensor:
        """M_t: once a turn it is written to the session; before that it is only previewed."""
        if state.memory is None:
            if not turn_is_complete:
                return self.memory.preview(state.session, query)
            state.memory = self.memory.update(state.session, query)
        return state.memory

    def _scorer(self, name: str) -> Scorer:
        if name not in self._scorers:
            self._scorers[name] = make_scorer(name, self.settings)
        return self._scorers[name]


def attach(result: None, scheduler: Any, *args: Any, **kwargs: Any) -> None:
    """After Scheduler.__init__: prove the hooks once more in this process, then start serving."""
    global _runtime
    activation.prove()
    _runtime = Runtime(activation.active_settings(), scheduler)
    logger.info("intentkv is on: %s", _runtime.settings)


def current() -> Runtime:
    """The runtime of this scheduler process.

    Raises:
        RuntimeError: called before `attach`.
    """
    if _runtime is None:
        raise RuntimeError("intentkv's runtime does not exist yet: it is made when the scheduler has started")
    return _runtime


def current_or_none() -> Runtime | None:
    return _runtime
