"""Plays every session in every configuration on one server, and notes what each turn brought."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import openai

from intentkv.evals.client import TurnResult, flush_cache, play
from intentkv.evals.configurations import AS_PUBLISHED, FULL, Configuration
from intentkv.evals.journal import Journal
from intentkv.evals.sessions import Session, Turn


def play_all(
    url: str,
    configurations: Sequence[Configuration],
    sessions: Sequence[Session],
    journal: Journal,
    model: str = "default",
    finished: Callable[[str, str], None] = lambda configuration, session: None,
) -> None:
    """Adds to `journal` what it does not hold yet; `finished` is called with configuration and session after each play.

    The full cache must be in the journal or come first in `configurations`: budgets are shares of the tokens that the
    sessions end with there. Every play begins with an empty cache, so none finds what another one computed, and a run
    that was killed and started again plays what is left as it would have.

    Raises:
        openai.APIConnectionError: the server is gone. Everything finished is in the journal.
    """
    names = [session.name for session in sessions]
    for configuration in configurations:
        params = configuration.params(mean_final_tokens(journal, names) if configuration.scorer is not None else 0)
        for session in sessions:
            if not journal.has(configuration.key, session.name):
                sglang = flush_cache(url)
                if configuration.scorer is not None and not sglang:
                    raise ValueError(f"{url} is no SGLang server: {configuration.key} cannot be asked of it")
                turns = _play_one(session, url, model, params, sglang, configuration.forgets)
                journal.add({"configuration": configuration.key, "session": session.name, "turns": turns})
                finished(configuration.key, session.name)


def mean_final_tokens(journal: Journal, sessions: Sequence[str]) -> float:
    """Tokens that the main agents of `sessions` have at their end with the full cache, on average.

    Raises:
        ValueError: one of them has not been played with the full cache, or was refused there from its first turn on.
    """
    ends: list[int] = []
    for session in sessions:
        plays = [p for p in journal.plays if (p["configuration"], p["session"]) == (FULL, session)]
        done = [turn for play in plays for turn in play["turns"] if turn["completed"] and not turn["branch"]]
        if not done:
            raise ValueError(
                f"{session} has no finished turn with the full cache, so budgets are not known: play that first"
            )
        ends.append(max(turn["logical_tokens"] for turn in done))
    return sum(ends) / len(ends)


def _play_one(
    session: Session, url: str, model: str, params: dict[str, Any], sglang: bool, forget: bool
) -> list[dict[str, Any]]:
    """One sample a turn. A turn that the server refuses or gives up, and all after it, are not completed."""
    samples: list[dict[str, Any]] = []
    failure = ""
    results = play(session, url, model, params, sglang=sglang, forget=forget)
    try:
        for turn, result in zip(session.turns, results, strict=True):
            if "intentkv_scorer" in params and result.intentkv is None:
                raise ValueError(
                    f"{url} serves without intentkv: start it with --enable-intentkv, or ask for no scorers"
                )
            if forget and (result.cached_tokens or (result.intentkv or {}).get("events", 0) > 1):
                raise ValueError(
                    f"{AS_PUBLISHED} computes every prompt anew and drops once, but a turn of {session.name} reused "
                    f"{result.cached_tokens} tokens and had {(result.intentkv or {}).get('events')} events: start {url} "
                    f"with --chunked-prefill-size -1 and --intentkv-trigger above {session.answer_tokens}"
                )
            samples.append({**_about(turn), **_sample(result)})
    except openai.APITimeoutError as error:
        failure = str(error)
    except openai.APIConnectionError:
        raise  # nobody there: not this configuration's fault, and no result
    except openai.OpenAIError as error:
        failure = str(error)
    missing = session.turns[len(samples) :]
    return samples + [{**_about(turn), "completed": False, "right": False, "error": failure} for turn in missing]


def _about(turn: Turn) -> dict[str, Any]:
    names = ("age", "asked_before", "as_argument", "branch", "rewritten", "expected")
    return {name: getattr(turn, name) for name in names}


def _sample(result: TurnResult) -> dict[str, Any]:
    """What is kept of a turn. Tokens at its end; a server without intentkv's report reads every token it has."""
    logical = result.prompt_tokens + result.completion_tokens
    told = result.intentkv or {}
    live = told.get("live_tokens", logical)
    return {
        "completed": True,
        "right": result.right,
        "answer": result.answer,
        "prompt_tokens": result.prompt_tokens,
        "cached_tokens": result.cached_tokens,
        "logical_tokens": logical,
        "live_tokens": live,
        "rows_read": (logical - result.cached_tokens) * live,
        "events": told.get("events", 0),
        "freed_slots": told.get("freed_slots", 0),
        "score_ms": told.get("score_ms", 0.0),
        "seconds": round(result.seconds, 3),
    }
