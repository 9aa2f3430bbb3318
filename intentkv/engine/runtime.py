"""The scheduler's half: decides when a session is looked at and what it drops.

observe (engine/observer.py) -> score (engine/scoring.py) and keep (here), on the forward's stream -> apply (engine/cache.py, which calls
`decide` at the next checkpoint).
"""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from typing import Any
from weakref import WeakValueDictionary

import numpy as np
from sglang.srt.runtime_context import get_observability
from torch import Tensor

from intentkv.apply import rows
from intentkv.apply.live_view import LiveViews
from intentkv.config import Settings
from intentkv.engine import activation, ranks
from intentkv.engine.action_observer import ActionObserver
from intentkv.engine.chat_format import jinja_template, message_format
from intentkv.engine.confidence_observer import ConfidenceObserver
from intentkv.engine.live_backends import attach_views, reads_whole_pages
from intentkv.engine.metrics import create_metrics
from intentkv.engine.sampling import SamplingObservers
from intentkv.engine.scoring import Scoring
from intentkv.engine.slot_moves import SlotMoves, behind_forwards
from intentkv.engine.state import Pending, RequestState, Scored
from intentkv.engine.tracing import create_trace
from intentkv.keep import moments
from intentkv.keep.auto_budget import AutoBudgets
from intentkv.keep.forced import forced_mask, last_page, whole_pages
from intentkv.keep.select import choose_drop, droppable
from intentkv.observe.spans import GLIMPSE_TOKENS
from intentkv.score.base import OF_QUERIES

logger = logging.getLogger(__name__)

NEVER = 2**31  # tokens; ActKV looks at a generation when a round ends, whatever its length

_runtime: Runtime | None = None


class Runtime:
    """One per scheduler process. `states` only looks requests up; each Req owns its state."""

    def __init__(self, settings: Settings, scheduler: Any) -> None:
        self._scheduler, runner = scheduler, scheduler.tp_worker.model_runner
        self.settings = settings
        self.ranks, self.agreement = ranks.join(scheduler.req_to_token_pool.req_to_token.device)
        self.states: WeakValueDictionary[str, RequestState] = WeakValueDictionary()
        self.running_plan: Any = None
        self.unaudited = 0  # requests opened since the ledger was last audited
        self.cache: Any = scheduler.tree_cache
        self.metrics = create_metrics(self.cache, get_observability().enable_metrics and ranks.is_first())
        self.trace = create_trace(settings, scheduler)
        self.format = message_format(scheduler.tokenizer, scheduler.server_args.chat_template)
        self._rows: Tensor = scheduler.req_to_token_pool.req_to_token
        self.page_size: int = scheduler.page_size
        self._chunk: int | None = scheduler.chunked_prefill_size
        self.views = LiveViews(self._rows)
        self.cache.views = self.views
        self.cache.decide = self.decide
        self.cache.admit = self.admit
        self.cache.stop = self.stop
        self.cache.usable = self.usable
        self.cache.peak = self.peak
        self.cache.released = self.released
        self.cache.applied = self.trace.applied
        self.cache.whole_pages = reads_whole_pages(runner.attn_backend)
        self.cache.on_reset = self._forget_sessions
        attach_views(runner.attn_backend, self.views)
        self.budgets = AutoBudgets(
            settings.budget_init, settings.budget_max, settings.budget_growth, settings.max_sessions
        )
        self.confidence = ConfidenceObserver(self.budgets, self.states, self.ranks)
        if runner.sampling_observer is not None:
            activation.refuse(
                ["another plug-in observes sampling already: remove it, or leave it out with SGLANG_PLUGINS"]
            )
        runner.sampling_observer = sampling = SamplingObservers(self.confidence)
        template = jinja_template(scheduler.tokenizer, scheduler.server_args.chat_template)
        pool, layers = scheduler.token_to_kv_pool_allocator.get_kvcache(), runner.model_config.num_hidden_layers
        self.actions = ActionObserver(settings, scheduler.tokenizer, template, pool, self.views, layers, self.ranks)
        self.scoring = Scoring(settings, scheduler, self.views, sampling, self.ranks)
        self.cache.move = SlotMoves(scheduler, self.scoring)
        problem = self.scoring.prepare(settings.scorer)
        if problem is not None:
            activation.refuse([f"--intentkv-scorer {settings.scorer}: {problem}"])

    def _forget_sessions(self) -> None:
        for known in (self.scoring.memory, self.budgets, self.actions):
            known.clear()

    def open_session(self, state: RequestState, ids: np.ndarray) -> None:
        """Give a new request what its session has left for its budget and its scorer; `ids`: `[n]` int64, its prompt."""
        if state.budget.kind == "auto":
            state.budget = self.budgets.decide(state.session)
            self.confidence.waiting += 1
        self.actions.admit(state, ids)

    def look(self, state: RequestState, row: int, length: int) -> None:
        """Look at one request after a forward, and hold an event if this is the moment for one.

        From the end of the page on (see `Pending`), what the event drops is hidden from every forward, whether or not the
        scheduler has launched the next one before it hears of the event; the next checkpoint then frees it (`decide`).

        Args:
            row: row of `req_to_token`. length: logical tokens now in it.
        """
        if state.turn is None and length >= state.prompt_tokens:
            self.scoring.complete(state)
        if length < state.look:
            return
        self._follow_confidence(state, length)
        if state.pending is None and self._due(state, length, state.holes):
            begin = time.perf_counter()
            scored = self.scoring.score(state, row, self._forced(state, length))
            drop = self._choose(state, scored)
            self.agreement.decided(state.session, length, drop)
            if len(drop):
                state.pending = Pending(drop, length, rows.page_ceil(length, self.page_size), scored)
            seconds = time.perf_counter() - begin
            state.score_ms += seconds * 1e3
            self.metrics.scored(seconds)
        if state.pending is None:
            self._look_after(state, length, state.holes)
        elif length < state.pending.length:
            state.look = state.pending.length
        else:
            holes = rows.merge(state.holes, state.pending.drop)
            self.views.set_holes(row, holes, length)
            self._look_after(state, length, holes)

    def _choose(self, state: RequestState, scored: Scored) -> np.ndarray:
        """What goes, `[n]` int64 ascending, by the scores that the history got."""
        if np.isnan(scored.scores).any():
            logger.warning("session %s: its scores are not numbers, so nothing is dropped", state.label)
            return rows.NO_POSITIONS
        trigger = self.settings.trigger
        whole = self.cache.whole_pages
        drop = choose_drop(scored.scores, scored.forced, scored.holes, state.budget, trigger, self.page_size, whole)
        return rows.droppable(drop, scored.holes, len(scored.forced), self.page_size, whole)

    def end_rounds(self, reqs: Sequence[Any]) -> None:
        """The tokens of a decode step are committed: requests whose round has ended are looked at after their next step."""
        for req in self.actions.committed(reqs):
            req.intentkv.look = 0

    def _follow_confidence(self, state: RequestState, length: int) -> None:
        """A budget of auto is decided anew before each event. While the prompt is computed it stays: admission counts on
        it."""
        if state.budget.kind == "auto" and length > state.prompt_tokens:
            state.budget = self.budgets.decide(state.session)

    def decide(self, req: Any, committed: int) -> np.ndarray:
        """Positions to drop now, int64 ascending; called by the cache at a checkpoint that covers `committed` tokens."""
        state: RequestState = req.intentkv
        if state.action is not None and req.finished():
            self.actions.finished(req)
            if state.pending is None or state.pending.chosen > committed:
                state.pending, state.look = None, committed
                self.look(state, req.kv.req_pool_idx, committed)
        pending = state.pending
        # The next step may have been launched, and have held an event, before this checkpoint: that one comes later. A
        # finished request computes no more, so it waits for no page's end.
        if pending is None or committed < (pending.chosen if req.finished() else pending.length):
            return rows.NO_POSITIONS
        state.pending = None
        state.events += 1
        self.trace.decided(pending.scored)
        return pending.drop

    def admit(self, req: Any, start: int, holes: np.ndarray) -> None:
        """A request gets a row, of which `start` tokens with `holes` were found; called by the cache before they show."""
        state: RequestState = req.intentkv
        if not self._resumes(state, holes):
            state.goal, state.pending = len(req.full_untruncated_fill_ids), None
            self._look_after(state, self._new_from(state, start), holes)

    def released(self, req: Any) -> None:
        """A request gives back its row. If it is retracted, it computes again what is not filed, and must know it as well."""
        state: RequestState = req.intentkv
        if self.scoring.surprise is not None and not req.finished():
            row = req.kv.req_pool_idx
            behind_forwards(self._scheduler, self._rows)  # the step that is still running writes there
            self.scoring.surprise.keep(state, self._rows[row, : req.kv.kv_committed_len], row)

    def usable(self, req: Any, found: int) -> int:
        """How many of `found` tokens a request may take from the cache; called by the cache at every match.

        All of them, unless the scorer observes queries and the hit ends just behind the start of the newest message: how far
        others have sent the same message's beginning must not decide what of it is observed, and so little is quickly
        computed again. A session that cannot outgrow its budget in the model's context finds what it would find in SGLang.
        """
        state: RequestState = req.intentkv
        start = state.spans.query[0]
        if not state.needs & OF_QUERIES or state.turn is not None or not start < found < start + GLIMPSE_TOKENS:
            return found
        context = self._rows.shape[1]
        return start if self._due(state, context, rows.NO_POSITIONS) else found

    def stop(self, req: Any) -> int | None:
        """Length at which the prefill of a request must stop for an event; None where nothing is due before its end."""
        state: RequestState = req.intentkv
        goal = len(req.full_untruncated_fill_ids)
        holes = getattr(req.last_node, "holes", rows.NO_POSITIONS)
        planned = req.kv.holds_kv or self._resumes(state, holes)
        stop = state.look if planned else self._moment(state, self._new_from(state, req.prefix_len), goal, holes)
        return stop if stop < goal else None

    def _new_from(self, state: RequestState, found: int) -> int:
        """Where the tokens to be computed begin, as far as the next event is concerned: a hit that ends near the newest
        message's start counts as one up to it. It may end before, for the sake of whole pages or of a token that was not
        computed in time, or behind, where others have sent the same beginning."""
        start = state.spans.query[0]
        behind = moments.glimpse(self._chunk)  # the first event is not due in there
        return start if start - GLIMPSE_TOKENS <= found < start + behind else found

    def _resumes(self, state: RequestState, holes: np.ndarray) -> bool:
        """Whether a retracted request goes on as if nothing had been. If holes were evicted meanwhile, or a parallel call of the
        session has dropped more, what it had chosen is out of date and it decides anew."""
        return state.turn is not None and np.array_equal(holes, state.holes)

    def _look_after(self, state: RequestState, length: int, holes: np.ndarray) -> None:
        """Set when the request is looked at next, after `length` tokens, with `holes`."""
        if length < state.goal:
            state.look = self._moment(state, length, state.goal, holes)
        elif state.action is not None:
            state.look = NEVER
        else:
            # Two steps may be on their way: the one after an event is launched before the event is applied.
            state.look = moments.while_generating(length + 1, state.prompt_tokens, self.settings.trigger)
        state.glimpse = state.new_query()
        state.glimpse_from = state.look - moments.glimpse(self._chunk)

    def _moment(self, state: RequestState, start: int, goal: int, holes: np.ndarray) -> int:
        return moments.while_computing(start, goal, self._chunk, lambda length: self._due(state, length, holes))

    def _due(self, state: RequestState, length: int, holes: np.ndarray) -> bool:
        return droppable(self._forced(state, length), holes, state.budget, self.settings.trigger) > 0

    def _forced(self, state: RequestState, length: int) -> np.ndarray:
        forced = forced_mask(length, state.spans, self.settings.recent)
        return whole_pages(forced, self.page_size) if self.cache.whole_pages else last_page(forced, self.page_size)

    def peak(self, req: Any, length: int) -> int:
        """Most live tokens of `req` while its first `length` tokens are computed in chunks with an event after each.

        What is always kept, the budget, what is too little for an event, and one chunk with the glimpse that an event
        wants before it; pages may be cut on both sides, and padded where survivors were packed.
        """
        state: RequestState = req.intentkv
        forced = int(self._forced(state, length).sum())
        kept = forced + state.budget.tokens(length - forced) + self.settings.trigger - 1
        if self._chunk is None:
            return length
        return kept + self._chunk + moments.glimpse(self._chunk) + GLIMPSE_TOKENS + 3 * self.page_size


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
