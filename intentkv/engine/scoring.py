"""score: what each scorer is given of a request's history, and what is observed because a scorer needs it."""

from __future__ import annotations

import zlib
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from sglang.srt.layers.radix_attention import RadixAttention
from torch import Tensor

from intentkv.apply.live_view import LiveViews
from intentkv.config import Settings
from intentkv.engine.chat_format import token_marks
from intentkv.engine.collected import AttentionTap, covariance_input, window_input
from intentkv.engine.graph_queries import DECODE_NEEDS
from intentkv.engine.live_backends import hides_queries
from intentkv.engine.sampling import SamplingObservers
from intentkv.engine.state import NO_TURN, RequestState, Scored, Turn
from intentkv.engine.support import groups_problem
from intentkv.engine.surprise import SurpriseObserver, lm_head_problem
from intentkv.keep.dialogue import newest_that_fit, room
from intentkv.keep.select import candidates
from intentkv.observe.attention_mass import AttentionMass
from intentkv.observe.segments import segment_numbers, word_numbers
from intentkv.observe.spans import query_positions
from intentkv.score.base import Need, ScoreInput, Scorer
from intentkv.score.memory import QueryMemory
from intentkv.score.ranks import Ranks
from intentkv.score.registry import HEAD_SCORER, make_scorer


class Scoring:
    """The scorers of one scheduler process, and what they read.

    Attributes:
        memory: the query memories of all sessions.
        surprise, attention: by slot; None until the first request comes whose scorer needs it.
    """

    def __init__(
        self, settings: Settings, scheduler: Any, views: LiveViews, sampling: SamplingObservers, ranks: Ranks
    ) -> None:
        runner = scheduler.tp_worker.model_runner
        self.memory = QueryMemory(settings.memory_decay, settings.max_sessions)
        self.surprise: SurpriseObserver | None = None
        self.attention: AttentionMass | None = None
        self._settings = settings
        self._scorers: dict[str, Scorer] = {}
        if settings.head is not None:
            self._scorer(HEAD_SCORER)  # now, since a file that is gone must stop the start, not a request
        self._model = runner.model
        self._hides_queries = hides_queries(runner.attn_backend)
        self._marks = token_marks(scheduler.tokenizer)
        self._rows: Tensor = scheduler.req_to_token_pool.req_to_token
        self._pool = scheduler.token_to_kv_pool_allocator.get_kvcache()
        self._views, self._sampling, self._ranks = views, sampling, ranks
        self._kv_heads: int | None = runner.model_config.get_total_num_kv_heads() if ranks.size > 1 else None
        self._layers: int = runner.model_config.num_hidden_layers
        # One factor for all layers: no supported model scales layers differently.
        self._scale: float = next(m.scaling for m in runner.model.modules() if isinstance(m, RadixAttention))

    def prepare(self, scorer: str) -> str | None:
        """Get ready to observe what a scorer needs; returns why that cannot be done, or None. Cheap when repeated."""
        if self._kv_heads is not None and (problem := groups_problem(scorer, self._kv_heads, self._ranks.size)):
            return problem
        needs = self.needs(scorer)
        if self._hides_queries and needs & DECODE_NEEDS:
            return (
                "it looks at the queries of decode steps, which the decode CUDA graphs of this server do not keep: start "
                f"the server with --intentkv-scorer {scorer}, or with --disable-cuda-graph"
            )
        if self.surprise is None and "surprise" in needs:
            problem = lm_head_problem(self._model)
            if problem is not None:
                return problem
            keys = self._pool.get_key_buffer(0)
            self.surprise = SurpriseObserver(len(keys), len(self._rows), keys.device, self._ranks)
            self._sampling.parts.append(self.surprise)
        if self.attention is None and "attention" in needs:
            keys = self._pool.get_key_buffer(0)
            self.attention = AttentionMass(len(keys), keys.device)
        return None

    def by_slot(self) -> list[Tensor]:
        """All that is kept by slot, `[S, ...]` each on the pool's device: what is moved to another slot takes it along."""
        surprise = [] if self.surprise is None else [self.surprise.by_slot]
        return surprise + ([] if self.attention is None else [self.attention.received])

    def needs(self, scorer: str) -> frozenset[Need]:
        return self._scorer(scorer).needs

    def tap(self, scorer: str) -> AttentionTap | None:
        """What observes one request's attention, if its scorer needs that; `prepare` comes first."""
        if self.attention is None or "attention" not in self.needs(scorer):
            return None
        return AttentionTap(self.attention, self._pool.get_key_buffer, self._rows, self._views, self._scale)

    def complete(self, state: RequestState) -> None:
        """The whole prompt has been observed: the session's memory takes it in."""
        state.turn = self._turn(state, self.memory.update)

    def _turn(self, state: RequestState, remember: Callable[[str, Tensor], Tensor]) -> Turn:
        if "query" not in state.needs:
            return NO_TURN
        observed = state.query or state.glimpse
        query = observed.mean()
        return Turn(query, remember(state.session, query), covariance_input(observed))

    def score(self, state: RequestState, row: int, forced: np.ndarray) -> Scored:
        """Score the live history of a row; `forced`: `[n]` bool, of its n tokens those that are always kept."""
        length = len(forced)
        turn = state.turn or self._turn(state, self.memory.preview)  # of an incomplete prompt: only previewed
        positions = torch.from_numpy(candidates(forced, state.holes))
        slots = self._rows[row, positions.to(self._rows.device)].long()
        asked = torch.from_numpy(query_positions(state.spans, length, state.holes))
        history = int(np.count_nonzero(~forced))
        ids = _read(state, length)
        segments = segment_numbers(ids, self._marks)
        words = word_numbers(ids, segments, self._marks) if "words" in state.needs else None
        scores = self._scorer(state.scorer).score(
            ScoreInput(
                layer_keys=self._pool.get_key_buffer,
                slots=slots,
                positions=positions,
                memory=turn.memory,
                query=turn.query,
                seed=zlib.crc32(state.session.encode()),
                num_layers=self._layers,
                share=state.budget.share(history),
                segments=torch.from_numpy(segments)[positions],
                surprise=None if self.surprise is None else self.surprise.by_slot[slots],
                window=window_input(state, self._rows[row], length, self._scale),
                attention=None if state.tap is None else state.tap.received(slots),
                covariance=turn.covariance,
                layer_values=self._pool.get_value_buffer if "values" in state.needs else None,
                keep_scores=None if state.action is None else torch.from_numpy(state.action.keep.at(positions.numpy())),
                query_slots=self._rows[row, asked.to(self._rows.device)].long(),
                dialogue=_dialogue(state, history, positions) if "dialogue" in state.needs else None,
                words=None if words is None else torch.from_numpy(words)[positions],
                ranks=self._ranks,
            )
        )
        return Scored(self._ranks.first(scores.cpu().contiguous()).numpy(), forced, state.holes)

    def _scorer(self, name: str) -> Scorer:
        if name not in self._scorers:
            self._scorers[name] = make_scorer(name, self._settings)
        return self._scorers[name]


def _dialogue(state: RequestState, history: int, positions: Tensor) -> Tensor:
    tokens = room(state.budget.tokens(history), history)
    return torch.from_numpy(newest_that_fit(state.spans.said, positions.numpy(), tokens))


def _read(state: RequestState, length: int) -> np.ndarray:
    """The tokens of the first `length` positions, `[length]` int64. What was generated is not read back for this: -1, until it comes
    back in the next turn's prompt."""
    ids = np.full(length, -1, np.int64)
    known = state.prompt[:length]
    ids[: len(known)] = known
    return ids
