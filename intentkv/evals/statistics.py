"""Figures of an evaluation from its turns, with bootstrap intervals over sessions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal

import numpy as np

Turns = list[dict[str, Any]]
Plays = Mapping[str, Turns]  # session -> its turns
RESAMPLES = 2000
CONFIDENCE = 0.95
AGES = {"0": (0, 0), "1-2": (1, 2), "3-5": (3, 5), "6+": (6, 10**9)}  # turns since the answer was shown


def accuracy(turns: Sequence[Mapping[str, Any]]) -> float | None:
    """Share of turns answered right; one that was not completed is wrong. None without turns."""
    return sum(turn["right"] for turn in turns) / len(turns) if turns else None


def interval(
    plays: Plays,
    against: Plays | None = None,
    measure: Literal["ratio", "difference"] = "ratio",
    seed: int = 0,
    resamples: int = RESAMPLES,
) -> tuple[float, float] | None:
    """The 95 % bootstrap interval (percentiles) of the accuracy, or of its `measure` against that of `against`.

    Sessions are drawn, not turns, because turns of one session share its history; and both sides by the same draw,
    because a session that is hard is hard for both. None with less than two sessions, or where every draw's ratio is
    without a value. Raises KeyError where `against` lacks a session of `plays`.
    """
    names = sorted(plays)
    if len(names) < 2:
        return None
    drawn = np.random.default_rng(seed).integers(len(names), size=(resamples, len(names)))
    right, count = _per_session(plays, names)
    values = right[drawn].sum(1) / count[drawn].sum(1)
    if against is not None:
        right, count = _per_session(against, names)
        base = right[drawn].sum(1) / count[drawn].sum(1)
        values = values - base if measure == "difference" else values[base > 0] / base[base > 0]
    if len(values) == 0:
        return None
    low, high = np.quantile(values, [(1 - CONFIDENCE) / 2, (1 + CONFIDENCE) / 2])
    return round(float(low), 4), round(float(high), 4)


def _per_session(plays: Plays, names: Sequence[str]) -> tuple[Any, Any]:
    """`[sessions]` float64 each: right answers and turns, in the order of `names`."""
    right = np.array([sum(turn["right"] for turn in plays[name]) for name in names], dtype=np.float64)
    return right, np.array([len(plays[name]) for name in names], dtype=np.float64)


def summary(plays: Plays, full: Plays | None) -> dict[str, Any]:
    """Every figure of one configuration. `full`: the same sessions with the full cache, if they were played.

    `ci` is the interval of `of_full`, and of `accuracy` where `full` is None. Token figures are over completed turns and
    taken at the end of a turn; `prefilled_tokens` are those of prompts that were computed; `rows_read` counts one row of keys and values for each live token and computed token.
    """
    turns = [turn for name in sorted(plays) for turn in plays[name]]
    done = [turn for turn in turns if turn["completed"]]
    right = accuracy(turns)
    base = accuracy([turn for name in plays for turn in full[name]]) if full else None
    own = interval(plays)
    return {
        "accuracy": right,
        "accuracy_ci": own,
        "of_full": right / base if right is not None and base else None,
        "ci": interval(plays, full) if full else own,
        "completion": len(done) / len(turns) if turns else None,
        "by_age": {
            name: _part([turn for turn in turns if span[0] <= turn["age"] <= span[1]]) for name, span in AGES.items()
        },
        "first_asked": _part([turn for turn in turns if not turn["asked_before"]]),
        "re_asked": _part([turn for turn in turns if turn["asked_before"]]),
        "as_argument": _part([turn for turn in turns if turn["as_argument"]]),
        "sub_agents": _part([turn for turn in turns if turn["branch"] > 0]),
        "prefix_hit": prefix_hit(plays),
        "prefilled_tokens": sum(turn["prompt_tokens"] - turn["cached_tokens"] for turn in done),
        "live_mean": _mean(done, "live_tokens"),
        "live_peak": max((turn["live_tokens"] for turn in done), default=None),
        "logical_mean": _mean(done, "logical_tokens"),
        "logical_peak": max((turn["logical_tokens"] for turn in done), default=None),
        "rows_read": sum(turn["rows_read"] for turn in done),
        "score_ms": round(sum(turn["score_ms"] for turn in done), 1),
        "seconds": round(sum(turn["seconds"] for turn in done), 1),
        "sessions": len(plays),
        "turns": len(turns),
    }


def prefix_hit(plays: Plays) -> float | None:
    """Share of prompt tokens that were not computed again, over all turns but each session's first."""
    later = [turn for turns in plays.values() for turn in turns[1:] if turn["completed"]]
    prompt = sum(turn["prompt_tokens"] for turn in later)
    return sum(turn["cached_tokens"] for turn in later) / prompt if prompt else None


def _part(turns: Turns) -> dict[str, Any]:
    return {"accuracy": accuracy(turns), "turns": len(turns)}


def _mean(turns: Turns, key: str) -> float | None:
    return round(sum(turn[key] for turn in turns) / len(turns), 1) if turns else None
