"""Plays every session in every configuration on one server, and notes what each turn brought."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any, Protocol, TypeVar

import openai

from intentkv.evals.client import TurnResult, flush_cache, play
from intentkv.evals.configurations import AS_PUBLISHED, FULL, Configuration
from intentkv.evals.journal import Journal
from intentkv.evals.sessions import Session, Turn


class Named(Protocol):
    """What can be played: a session, a case of a benchmark."""

    @property
    def name(self) -> str: ...


S = TypeVar("S", bound=Named)
Finished = Callable[[str, str], None]  # is told configuration and session


def play_all(
    url: str,
    configurations: Sequence[Configuration],
    sessions: Sequence[Session],
    journal: Journal,
    model: str = "default",
    finished: Finished = lambda configuration, session: None,
    together: int = 1,
) -> None:
    """Adds to `journal` what it does not hold yet; `finished` is called with configuration and session after each play.

    The full cache must be in the journal or come first in `configurations`: budgets are shares of the tokens that the
    sessions end with there. `together`: sessions at once, see `play_missing`.

    Raises:
        openai.APIConnectionError: the server is gone. Everything finished is in the journal.
    """
    names = [session.name for session in sessions]
    for configuration in configurations:
        pruned = configuration.scorer is not None
        params = configuration.params(mean_final_tokens(journal, names) if pruned else 0)
        one = partial(_play_one, url=url, model=model, params=params, forget=configuration.forgets)
        play_missing(url, configuration.key, pruned, sessions, journal, one, finished, together)


def play_missing(
    url: str,
    key: str,
    pruned: bool,
    sessions: Sequence[S],
    journal: Journal,
    play: Callable[..., dict[str, Any]],
    finished: Finished,
    together: int,
) -> None:
    """Plays those of `sessions` that `journal` does not hold under `key`, `together` at a time.

    Each batch begins with an empty cache, so none finds what another configuration computed, and a run that was killed
    and started again plays what is left as it would have. `play` gets a session and whether the server is an SGLang, and
    returns what is noted beside its name. Plays are noted in the order of `sessions`: a killed run loses those that were
    under way. With `together` above 1 a server computes other batches each time, so near ties may fall otherwise.

    Raises:
        ValueError: a `pruned` configuration was asked of a server that is no SGLang.
    """
    left = [session for session in sessions if not journal.has(key, session.name)]
    pool = ThreadPoolExecutor(together)
    try:
        for batch in (left[start : start + together] for start in range(0, len(left), together)):
            sglang = flush_cache(url)
            if pruned and not sglang:
                raise ValueError(f"{url} is no SGLang server: {key} cannot be asked of it")
            for session, played in zip(batch, pool.map(partial(play, sglang=sglang), batch), strict=True):
                journal.add({"configuration": key, "session": session.name, **played})
                finished(key, session.name)
    finally:
        pool.shutdown(
            wait=False, cancel_futures=True
        )  # after Ctrl-C the server is stopped, which ends what is under way


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
    session: Session, *, url: str, model: str, params: dict[str, Any], forget: bool, sglang: bool
) -> dict[str, Any]:
    """`turns`, one sample each. A turn that the server refuses or gives up, and all after it, are not completed."""
    samples: list[dict[str, Any]] = []
    failure = ""
    results = play(session, url, model, params, sglang=sglang, forget=forget)
    try:
        for turn, result in zip(session.turns, results, strict=True):
            require_report(result.intentkv, params, url)
            if forget and (result.cached_tokens or (result.intentkv or {}).get("events", 0) > 1):
                raise ValueError(
                    f"{AS_PUBLISHED} computes every prompt anew and drops once, but a turn of {session.name} reused "
                    f"{result.cached_tokens} tokens and had {(result.intentkv or {}).get('events')} events: start {url} "
                    f"with --chunked-prefill-size above the longest prompt, --intentkv-trigger above {session.answer_tokens}"
                )
            samples.append({**_about(turn), **_sample(result)})
    except openai.APITimeoutError as error:
        failure = str(error)
    except openai.APIConnectionError:
        raise  # nobody there: not this configuration's fault, and no result
    except openai.OpenAIError as error:
        failure = str(error)
    missing = session.turns[len(samples) :]
    lost = [{**_about(turn), "completed": False, "right": False, "error": failure} for turn in missing]
    return {"turns": samples + lost}


def require_report(told: dict[str, Any] | None, params: dict[str, Any], url: str) -> None:
    """Raises ValueError where `params` asked for a scorer and the answer is one without intentkv's report."""
    if "intentkv_scorer" in params and told is None:
        raise ValueError(f"{url} serves without intentkv: start it with --enable-intentkv, or ask for no scorers")


def _about(turn: Turn) -> dict[str, Any]:
    names = ("age", "asked_before", "as_argument", "branch", "rewritten", "expected")
    return {name: getattr(turn, name) for name in names}


def _sample(result: TurnResult) -> dict[str, Any]:
    """What is kept of a turn."""
    counts = {
        name: getattr(result, name) for name in ("prompt_tokens", "completion_tokens", "cached_tokens", "intentkv")
    }
    figures = token_sample(counts, result.seconds)
    return {"completed": True, "right": result.right, "answer": result.answer, **figures}


def token_sample(counts: dict[str, Any], seconds: float) -> dict[str, Any]:
    """Figures of one answer; `counts` as `token_counts` gives them.

    Tokens at its end; a server without intentkv's report reads every token it has. What only a budget of `auto` or ActKV
    reports is there where they do.
    """
    logical = counts["prompt_tokens"] + counts["completion_tokens"]
    told = counts["intentkv"] or {}
    live = told.get("live_tokens", logical)
    return {
        "prompt_tokens": counts["prompt_tokens"],
        "cached_tokens": counts["cached_tokens"],
        "logical_tokens": logical,
        "live_tokens": live,
        "rows_read": (logical - counts["cached_tokens"]) * live,
        "events": told.get("events", 0),
        "freed_slots": told.get("freed_slots", 0),
        "score_ms": told.get("score_ms", 0.0),
        "seconds": round(seconds, 3),
        **{name: told[name] for name in ("budget_tokens", "confidence_slope", "action_regions") if name in told},
    }
