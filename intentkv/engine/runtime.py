"""The scheduler's half: keeps memories and scorers, scores a request's history, decides what to drop.

observe (engine/observer.py) -> score and keep (here, on the forward's stream) -> apply (engine/cache.py, which calls
`decide` at the next checkpoint).
"""

from __future__ import annotations

import logging
import time
import zlib
from collections.abc import Callable, Sequence
from typing import Any
from weakref import WeakValueDictionary

import numpy as np
import torch
from sglang.srt.layers.radix_attention import RadixAttention
from sglang.srt.runtime_context import get_observability
from torch import Tensor

from intentkv.apply import rows
from intentkv.apply.live_view import LiveViews
from intentkv.config import Settings
from intentkv.engine import activation
from intentkv.engine.action_observer import ActionObserver
from intentkv.engine.chat_format import jinja_template, message_format, token_marks
from intentkv.engine.collected import AttentionTap, covariance_input, window_input
from intentkv.engine.confidence_observer import ConfidenceObserver
from intentkv.engine.live_backends import attach_views
from intentkv.engine.metrics import create_metrics
from intentkv.engine.state import Pending, RequestState, Scored, Turn
from intentkv.engine.surprise import SurpriseObserver, lm_head_problem
from intentkv.engine.tracing import create_trace
from intentkv.keep import moments
from intentkv.keep.auto_budget import AutoBudgets
from intentkv.keep.forced import forced_mask, whole_pages
from intentkv.keep.select import candidates, choose_drop, droppable
from intentkv.observe.attention_mass import AttentionMass
from intentkv.observe.segments import segment_numbers
from intentkv.observe.spans import GLIMPSE_TOKENS, query_positions
from intentkv.score.base import Need, ScoreInput, Scorer
from intentkv.score.memory import QueryMemory
from intentkv.score.registry import HEAD_SCORER, make_scorer

logger = logging.getLogger(__name__)

NEVER = 2**31  # tokens; ActKV looks at a generation when a round ends, whatever its length

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
        self.surprise: SurpriseObserver | None = None  # from the first request on whose scorer asks for it
        self.trace = create_trace(settings, scheduler)
        self._scorers: dict[str, Scorer] = {}
        self._model = runner.model
        if settings.head is not None:
            self._scorer(HEAD_SCORER)  # now, since a file that is gone must stop the start, not a request
        self.format = message_format(scheduler.tokenizer, scheduler.server_args.chat_template)
        self._marks = token_marks(scheduler.tokenizer)
        self._rows: Tensor = scheduler.req_to_token_pool.req_to_token
        self._pool = scheduler.token_to_kv_pool_allocator.get_kvcache()
        self.page_size: int = scheduler.page_size
        self._chunk: int | None = scheduler.chunked_prefill_size
        self._layers: int = runner.model_config.num_hidden_layers
        # One factor for all layers: no supported model scales layers differently.
        self._scale: float = next(m.scaling for m in runner.model.modules() if isinstance(m, RadixAttention))
        self.attention: AttentionMass | None = None  # from the first request on whose scorer needs it
        self.views = LiveViews(self._rows)
        self.cache.views = self.views
        self.cache.decide = self.decide
        self.cache.admit = self.admit
        self.cache.stop = self.stop
        self.cache.usable = self.usable
        self.cache.peak = self.peak
        self.cache.applied = self.trace.applied
        self.cache.on_reset = self._forget_sessions
        attach_views(runner.attn_backend, self.views)
        self.budgets = AutoBudgets(
            settings.budget_init, settings.budget_max, settings.budget_growth, settings.max_sessions
        )
        self.confidence = ConfidenceObserver(self.budgets, self.states)
        if runner.sampling_observer is not None:
            activation.refuse(
                ["another plug-in observes sampling already: remove it, or leave it out with SGLANG_PLUGINS"]
            )
        runner.sampling_observer = self.confidence
        template = jinja_template(scheduler.tokenizer, scheduler.server_args.chat_template)
        self.actions = ActionObserver(settings, scheduler.tokenizer, template, self._pool, self.views, self._layers)
        problem = self.prepare(settings.scorer)
        if problem is not None:
            activation.refuse([f"--intentkv-scorer {settings.scorer}: {problem}"])

    def _forget_sessions(self) -> None:
        for known in (self.memory, self.budgets, self.actions):
            known.clear()

    def open_session(self, state: RequestState, ids: np.ndarray) -> None:
        """Give a new request what its session has left for its budget and its scorer; `ids`: `[n]` int64, its prompt."""
        if state.budget.kind == "auto":
            state.budget = self.budgets.decide(state.session)
            self.confidence.waiting += 1
        self.actions.admit(state, ids)

    def prepare(self, scorer: str) -> str | None:
        """Get ready to observe what a scorer needs; returns why that cannot be done, or None. Cheap when repeated."""
        needs = self.needs(scorer)
        if self.surprise is None and "surprise" in needs:
            problem = lm_head_problem(self._model)
            if problem is not None:
                return problem
            keys = self._pool.get_key_buffer(0)
            self.surprise = SurpriseObserver(len(keys), keys.device)
        if self.attention is None and "attention" in needs:
            keys = self._pool.get_key_buffer(0)
            self.attention = AttentionMass(len(keys), keys.device)
        return None

    def needs(self, scorer: str) -> frozenset[Need]:
        return self._scorer(scorer).needs

    def tap(self, scorer: str) -> AttentionTap | None:
        """What observes one request's attention, if its scorer needs that; `prepare` comes first."""
        if self.attention is None or "attention" not in self.needs(scorer):
            return None
        return AttentionTap(self.attention, self._pool.get_key_buffer, self._rows, self.views, self._scale)

    def look(self, state: RequestState, row: int, length: int) -> None:
        """Look at one request after a forward, and hold an event if this is the moment for one.

        What the event drops is hidden from the next forward on, whether or not the scheduler has launched that one before
        it hears of the event; the next checkpoint then frees it (`decide`).

        Args:
            row: row of `req_to_token`. length: logical tokens now in it.
        """
        if state.turn is None and length >= state.prompt_tokens:
            state.turn = self._turn(state, self.memory.update)
        if length < state.look:
            return
        begin = time.perf_counter()
        self._follow_confidence(state, length)
        holes = state.holes
        if self._due(state, length, holes):
            scored = self._score(state, row, length)
            drop = self._choose(state, scored)
            if len(drop):
                state.pending = Pending(drop, length, scored)
                holes = rows.merge(holes, drop)
                self.views.set_holes(row, holes, length)
            seconds = time.perf_counter() - begin
            state.score_ms += seconds * 1e3
            self.metrics.scored(seconds)
        self._look_after(state, length, holes)

    def _choose(self, state: RequestState, scored: Scored) -> np.ndarray:
        """What goes, `[n]` int64 ascending, by the scores that the history of `scored.length` tokens got."""
        if np.isnan(scored.scores).any():
            logger.warning("session %s: its scores are not numbers, so nothing is dropped", state.label)
            return rows.NO_POSITIONS
        trigger = self.settings.trigger
        drop = choose_drop(scored.scores, scored.forced, scored.holes, state.budget, trigger, self.page_size)
        return rows.droppable(drop, scored.holes, len(scored.forced), self.page_size)

    def _score(self, state: RequestState, row: int, length: int) -> Scored:
        """Score the live history of a row of `length` tokens."""
        forced = self._forced(state, length)
        turn = state.turn or self._turn(state, self.memory.preview)  # of an incomplete prompt: only previewed
        positions = torch.from_numpy(candidates(forced, state.holes))
        slots = self._rows[row, positions.to(self._rows.device)].long()
        asked = torch.from_numpy(query_positions(state.spans, length, state.holes))
        scores = self._scorer(state.scorer).score(
            ScoreInput(
                layer_keys=self._pool.get_key_buffer,
                slots=slots,
                positions=positions,
                memory=turn.memory,
                query=turn.query,
                seed=zlib.crc32(state.session.encode()),
                num_layers=self._layers,
                segments=torch.from_numpy(self._segments(state, length))[positions],
                surprise=None if self.surprise is None else self.surprise.by_slot[slots],
                window=window_input(state, self._rows[row], length, self._scale),
                attention=None if state.tap is None else state.tap.received(slots),
                covariance=turn.covariance,
                layer_values=self._pool.get_value_buffer if "values" in state.needs else None,
                keep_scores=None if state.action is None else torch.from_numpy(state.action.keep.at(positions.numpy())),
                query_slots=self._rows[row, asked.to(self._rows.device)].long(),
            )
        )
        return Scored(scores.cpu().numpy(), forced, state.holes)

    def _turn(self, state: RequestState, remember: Callable[[str, Tensor], Tensor]) -> Turn:
        observed = state.query or state.glimpse
        query = observed.mean()
        return Turn(query, remember(state.session, query), covariance_input(observed))

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
            if state.pending is None or state.pending.length > committed:
                state.look = committed
                self.look(state, req.kv.req_pool_idx, committed)
        pending = state.pending
        # The next step may have been launched, and have held an event, before this checkpoint: that one comes later.
        if pending is None or pending.length > committed:
            return rows.NO_POSITIONS
        state.pending = None
        state.events += 1
        self.trace.decided(pending.scored)
        return pending.drop

    def admit(self, req: Any, start: int, holes: np.ndarray) -> None:
        """A request gets a row, of which `start` tokens with `holes` were found; called by the cache before they show."""
        state: RequestState = req.intentkv
        if not self._resumes(state, holes):
            state.goal = len(req.full_untruncated_fill_ids)
            self._look_after(state, start, holes)

    def usable(self, req: Any, found: int) -> int:
        """How many of `found` tokens a request may take from the cache; called by the cache at every match.

        All of them, but for a hit that ends just behind the start of the newest message: how far others have sent the same
        message's beginning must not decide what of it is observed, and so little is quickly computed again.
        """
        state: RequestState = req.intentkv
        start = state.spans.query[0]
        return start if state.turn is None and start < found < start + GLIMPSE_TOKENS else found

    def stop(self, req: Any) -> int | None:
        """Length at which the prefill of a request must stop for an event; None where nothing is due before its end."""
        state: RequestState = req.intentkv
        goal = len(req.full_untruncated_fill_ids)
        holes = getattr(req.last_node, "holes", rows.NO_POSITIONS)
        planned = req.kv.holds_kv or self._resumes(state, holes)
        stop = state.look if planned else self._moment(state, req.prefix_len, goal, holes)
        return stop if stop < goal else None

    def _resumes(self, state: RequestState, holes: np.ndarray) -> bool:
        """Whether a retracted request goes on as if nothing had been. If holes were evicted meanwhile, it decides anew."""
        return state.turn is not None and len(holes) >= len(state.holes)

    def _look_after(self, state: RequestState, length: int, holes: np.ndarray) -> None:
        """Set when the request is looked at next, after `length` tokens, with `holes`."""
        if length < state.goal:
            state.look = self._moment(state, length, state.goal, holes)
        elif state.action is not None:
            state.look = NEVER
        else:
            state.look = moments.while_generating(length, state.prompt_tokens, self.settings.trigger)
        state.glimpse = state.new_query()
        state.glimpse_from = state.look - moments.glimpse(self._chunk)

    def _moment(self, state: RequestState, start: int, goal: int, holes: np.ndarray) -> int:
        return moments.while_computing(start, goal, self._chunk, lambda length: self._due(state, length, holes))

    def _due(self, state: RequestState, length: int, holes: np.ndarray) -> bool:
        return droppable(self._forced(state, length), holes, state.budget, self.settings.trigger) > 0

    def _forced(self, state: RequestState, length: int) -> np.ndarray:
        return whole_pages(forced_mask(length, state.spans, self.settings.recent), self.page_size)

    def peak(self, req: Any, length: int) -> int:
        """Most live tokens of `req` while its first `length` tokens are computed in chunks with an event after each.

        What is always kept, the budget, what is too little for an event, and one chunk with the glimpse that an event
        wants before it; pages may be cut on both sides.
        """
        state: RequestState = req.intentkv
        forced = int(self._forced(state, length).sum())
        kept = forced + state.budget.tokens(length - forced) + self.settings.trigger - 1
        if self._chunk is None:
            return length
        return kept + self._chunk + moments.glimpse(self._chunk) + 2 * self.page_size

    def _segments(self, state: RequestState, length: int) -> np.ndarray:
        """Segment numbers of the first `length` positions, `[length]` int64. What was generated is not read back for this: it
        counts as plain text until it comes back in the next turn's prompt."""
        ids = np.full(length, -1, np.int64)
        known = state.prompt[:length]
        ids[: len(known)] = known
        return segment_numbers(ids, self._marks)

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
