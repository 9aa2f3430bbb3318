"""ActKV inside SGLang: attention recovered for requests inside an action, events at the end of a round, auto budgets.

    begin     before a decode step: which requests are inside a region, and the slots they read
    add       after each layer's attention: A = exp(s - LSE) of their queries, added up over layers
    committed after the step's tokens are on the host: regions move on, a round that ended asks for an event

Requests outside a region cost one look at their state a step; requests of other scorers are not even listed.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any
from weakref import WeakValueDictionary

import numpy as np
import torch
from torch import Tensor

from intentkv.config import Settings
from intentkv.engine.action_track import ActionTrack
from intentkv.engine.state import RequestState
from intentkv.kernels.lse import log_sum_exp
from intentkv.kernels.recover import recover_attention
from intentkv.kernels.slot_lists import SlotLists
from intentkv.observe.action_regions import ActionRegions, make_detector
from intentkv.observe.call_templates import template_of
from intentkv.score.lrfu import SessionKeepScores
from intentkv.score.ranks import ALONE, Ranks

if TYPE_CHECKING:
    from intentkv.apply.live_view import LiveViews

logger = logging.getLogger(__name__)

FALLBACK = "hermes"


@dataclass
class _Step:
    """One decode step that is running: `rows` `[R]` int64 of its query tensor, and what their requests read."""

    states: list[RequestState]
    lengths: list[int]
    rows: Tensor
    lists: SlotLists
    sums: Tensor | None = None  # [H_kv, N] float32
    layers: int = 0


class ActionObserver:
    """One per scheduler process.

    Args:
        settings: the server's.
        tokenizer, chat_template: as of `chat_format.message_format`.
        pool: the KV pool; `get_key_buffer(layer)` gives `[S, H_kv, D]`.
        views: the rows' live views.
        layers: attention layers a forward passes.
        ranks: those that have the other heads.
    """

    def __init__(
        self,
        settings: Settings,
        tokenizer: Any,
        chat_template: str | None,
        pool: Any,
        views: LiveViews,
        layers: int,
        ranks: Ranks = ALONE,
    ) -> None:
        self._sessions = SessionKeepScores(settings.lrfu_decay, settings.top_p, settings.max_sessions)
        self._setting = settings.action_template
        self._tokenizer, self._chat_template = tokenizer, chat_template
        self._pool, self._views, self._layers, self._ranks = pool, views, layers, ranks
        self._inside: WeakValueDictionary[str, RequestState] = WeakValueDictionary()
        self._step: _Step | None = None

    @functools.cached_property
    def _template(self) -> str:
        """The call template in force; looked up when the first request asks for it."""
        if self._setting != "auto":
            return self._setting
        found = template_of(self._chat_template)
        if found is None:
            logger.warning(
                "intentkv knows no call template in this model's chat template and looks for that of %s; "
                "name it with --intentkv-action-template",
                FALLBACK,
            )
        return found or FALLBACK

    @functools.cache  # noqa: B019 - one observer a process; the vocabulary bounds it
    def _text(self, token: int) -> str:
        return str(self._tokenizer.decode([token], skip_special_tokens=False))

    def admit(self, state: RequestState, ids: np.ndarray) -> None:
        """A request has come in; `ids`: `[n]` int64, its prompt. Gives it a track if its scorer needs keep scores."""
        if "keep_scores" in state.needs:
            regions = ActionRegions(make_detector(self._template), self._text)
            keep = self._sessions.open(state.session, ids.astype(np.int32))
            state.action = ActionTrack(regions, keep, state.prompt_tokens)

    # -- a decode step

    @property
    def watching(self) -> bool:
        """Whether the decode step that is running has requests inside a region."""
        return self._step is not None

    def begin(self, forward_batch: Any) -> None:
        """Before a forward: list the requests inside a region, from host-known facts."""
        if self._step is not None:
            logger.warning(
                "a decode step passed %d of %d attention layers where ActKV could see them: report this as a bug",
                self._step.layers,
                self._layers,
            )
            self._step = None
        if not self._inside or not forward_batch.forward_mode.is_decode():
            return
        chosen = [(i, s) for i, rid in enumerate(forward_batch.rids) if (s := self._inside.get(rid)) is not None]
        if not chosen:
            return
        lengths = [int(forward_batch.seq_lens_cpu[i]) for i, _ in chosen]
        lists = [
            self._views.slots(int(forward_batch.intentkv_rows[i]), length)
            for (i, _), length in zip(chosen, lengths, strict=True)
        ]
        rows = torch.tensor([i for i, _ in chosen]).to(lists[0].device, non_blocking=True)
        self._step = _Step([state for _, state in chosen], lengths, rows, SlotLists.of(lists))

    def add(self, backend: Any, q: Tensor, layer: Any) -> None:
        """After one layer's attention; `q` `[T, H_q * D]` or `[T, H_q, D]`. Nothing to do outside of regions."""
        step = self._step
        if step is None:
            return
        keys = self._pool.get_key_buffer(layer.layer_id)
        query = q.view(len(q), layer.tp_q_head_num, layer.qk_head_dim)[step.rows]
        left = getattr(backend, "lse", None)  # [T, H_q] of the attention that just ran, if the backend leaves it
        lse = left[step.rows] if left is not None else log_sum_exp(query, keys, step.lists, layer.scaling)
        if step.sums is None:
            step.sums = torch.zeros(keys.shape[1], len(step.lists.slots), dtype=torch.float32, device=keys.device)
        recover_attention(query, keys, step.lists, lse, layer.scaling, step.sums)
        step.layers += 1
        if step.layers == self._layers:
            self._step = None
            self._hand_over(step)

    def _hand_over(self, step: _Step) -> None:
        """The mean over layers and KV heads, one number a live position, to each request's track."""
        assert step.sums is not None
        mean = _to_host(self._ranks.mean(step.sums.sum(0) / (self._layers * len(step.sums))))
        for state, length, span in zip(step.states, step.lengths, step.lists.spans(), strict=True):
            if state.action is not None:
                state.action.recovered(length - 1, mean[span], state.holes)

    # -- tokens reach the host

    def committed(self, reqs: Sequence[Any]) -> list[Any]:
        """A step's tokens are on the host; returns the running requests whose round has just ended."""
        over = []
        for req in reqs:
            state = getattr(req, "intentkv", None)
            if state is None or state.action is None or req.finished() or req.is_retracted:
                continue
            track = state.action
            track.read(req.output_ids)
            if track.inside:
                self._inside[req.rid] = state
            else:
                self._inside.pop(req.rid, None)
            if track.round_over:
                track.round_over = False
                over.append(req)
        return over

    def finished(self, req: Any) -> None:
        """A request has finished, and its last checkpoint is about to decide: its session remembers its keep scores."""
        state: RequestState = req.intentkv
        assert state.action is not None
        self._inside.pop(req.rid, None)
        state.action.finish(req.output_ids)
        tokens = np.array([*req.origin_input_ids, *req.output_ids], dtype=np.int32)
        self._sessions.note(state.session, tokens, state.action.keep)

    def clear(self) -> None:
        """Forget all sessions."""
        self._sessions.clear()


def _to_host(values: Tensor) -> Tensor:
    """A copy on the host that the host need not wait for: ready when what follows on this stream is."""
    if values.device.type == "cpu":
        return values
    host = torch.empty(values.shape, dtype=values.dtype, pin_memory=True)
    return host.copy_(values, non_blocking=True)
