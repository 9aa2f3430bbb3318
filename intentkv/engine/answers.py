"""Proof in every answer: `meta_info["intentkv"]` says what was dropped, freed and still read."""

from __future__ import annotations

from typing import Any

from intentkv.engine import runtime
from intentkv.engine.state import RequestState

KEY = "intentkv"


def report(req: Any, state: RequestState) -> dict[str, Any]:
    """What one finished request reports (design, section 4); counts in tokens and slots, `score_ms` in milliseconds.

    A budget of `auto` adds where it stands and the slope that decided it; ActKV adds the action regions of the answer, and
    how many entries of the session's text are of which access class.
    """
    logical = len(req.origin_input_ids) + len(req.output_ids)
    extra: dict[str, Any] = {}
    if state.budget.kind == "auto":
        slope = runtime.current().budgets.slope(state.session)
        extra |= {"budget_tokens": int(state.budget.value), "confidence_slope": slope}
    if state.action is not None:
        extra |= {"action_regions": state.action.regions, "access": state.action.keep.access.counts()}
    return {
        "session": state.label,
        "scorer": state.scorer,
        "budget": str(state.budget),
        "events": state.events,
        "logical_tokens": logical,
        "live_tokens": logical - len(state.holes),
        "dropped_tokens": len(state.holes),
        "freed_slots": state.freed,
        "reused_prefix_tokens": state.reused_prefix_tokens,
        "score_ms": round(state.score_ms, 3),
        **extra,
    }


def streamer_with_report(streamer_class: type, scheduler: Any) -> type:
    """A streamer class that adds the report of every request that finishes; called once at start-up."""

    class ReportingStreamer(streamer_class):
        has_additional_customized_info = True

        def build_additional_customized_info(self, reqs: list[Any]) -> dict[str, list[Any]]:
            reports = [_report_if_finished(req) for req in reqs]
            others = super().build_additional_customized_info(reqs)
            return others if not any(reports) else {**others, KEY: reports}

    return ReportingStreamer


def _report_if_finished(req: Any) -> dict[str, Any] | None:
    state = getattr(req, KEY, None)
    if state is None or not req.finished():
        return None
    told = report(req, state)
    active = runtime.current()
    active.metrics.finished(state)
    active.trace.finished(req, state, told)
    return told


def take_report(
    manager: Any, meta_info: dict, state: Any, customized_info: dict, index: int, finish_reason: Any
) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
    """Put the report into the answer as one object, and keep it out of SGLang's per-token accumulation."""
    if KEY not in customized_info:
        return None
    if customized_info[KEY][index] is not None:
        meta_info[KEY] = customized_info[KEY][index]
    rest = {key: values for key, values in customized_info.items() if key != KEY}
    return (manager, meta_info, state, rest, index, finish_reason), {}
