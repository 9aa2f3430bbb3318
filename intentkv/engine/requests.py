"""Requests as they come in: parameters checked in the front process, state opened and reset in the scheduler."""

from __future__ import annotations

from typing import Any

import numpy as np

from intentkv.config import parse_request
from intentkv.engine import replicas, runtime
from intentkv.engine.activation import active_settings
from intentkv.engine.session_keys import request_key
from intentkv.engine.state import RequestState
from intentkv.errors import SettingsError
from intentkv.observe.spans import find_spans


def validate_request(manager: Any, obj: Any, input_ids: list[int]) -> None:
    """Refuse bad `intentkv_*` parameters before the request reaches a scheduler, and send it to the one that has its session.

    Raises:
        SettingsError: a ValueError, which SGLang answers with HTTP 400; lists every field at fault.
    """
    sampling = getattr(obj, "sampling_params", None) or {}
    settings = parse_request(sampling.get("custom_params"), obj.session_id, active_settings())
    if settings.span is not None and settings.span[1] > len(input_ids):
        start, end = settings.span
        raise SettingsError(
            [f"intentkv_span is {start}:{end}, but the prompt has {len(input_ids)} tokens: end it within the prompt"]
        )
    replicas.route(manager, obj, settings, input_ids)


def open_request(req: Any, scheduler: Any, recv_req: Any, *args: Any, **kwargs: Any) -> None:
    """Attach the state to a new request, unless it opted out.

    `validate_request` has seen the parameters; a request that came round it is aborted with the same message.
    """
    req.intentkv = None
    try:
        settings = parse_request(req.sampling_params.custom_params, req.session_id, active_settings())
    except SettingsError as error:
        req.set_finish_with_abort(str(error))
        return
    if not settings.enabled or req.skip_radix_cache_insert:  # what the tree may not have is served as by stock SGLang
        return
    ids = np.asarray(req.origin_input_ids, dtype=np.int64)
    active = runtime.current()
    problem = active.scoring.prepare(settings.scorer)
    if problem is not None:
        req.set_finish_with_abort(f"intentkv_scorer: {settings.scorer} cannot rank this model's tokens: {problem}")
        return
    spans = find_spans(ids, active.format)
    key = request_key(settings, ids, spans, extra_key=req.extra_key, cache_salt=req.cache_salt, rid=req.rid)
    state = RequestState(
        key=key,
        label=settings.session or key.kind,
        scorer=settings.scorer,
        budget=settings.budget,
        spans=spans,
        prompt=ids,
        needs=active.scoring.needs(settings.scorer),
        tap=active.scoring.tap(settings.scorer),
    )
    active.open_session(state, ids)
    req.intentkv = state
    active.states[req.rid] = state
    active.unaudited += 1


def apply_while_decoding(result: None, processor: Any, batch: Any, outcome: Any) -> None:
    """After a decode step's result was processed: apply the events that the step has held.

    An event of the step launched after it waits for its own result: a request retracted in between computes that step
    again, behind the holes that it was computed behind.
    """
    runtime.current().end_rounds(batch.reqs)
    for req in batch.reqs:
        state = getattr(req, "intentkv", None)
        if state is not None and state.pending is not None and state.pending.length < req.seqlen:
            runtime.current().cache.checkpoint_decoding(req, up_to=state.pending.length)


def take_back_event(result: None, req: Any) -> None:
    """A retracted request starts again. What it has observed and chosen stays; an event that was not applied waits once
    more for the end of its page."""
    state = getattr(req, "intentkv", None)
    if state is None:
        return
    state.predicted = -1
    if state.pending is not None:
        state.look = state.pending.length
    if state.action is not None:
        state.action.forget_region()
