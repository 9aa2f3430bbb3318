"""Plays an agent session against an OpenAI-compatible server, with the `openai` client that agents use."""

import os
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import openai

from intentkv.evals.sessions import Session, Transcript, Turn, is_right

TURN_SECONDS = 300.0


@dataclass(frozen=True)
class TurnResult:
    """What one turn brought.

    Attributes:
        answer, right: the model's text, and whether it contains what was asked for.
        seconds: wall time of the request.
        prompt_tokens, completion_tokens: logical tokens, dropped ones included.
        cached_tokens: prompt tokens that were not computed again.
        intentkv: `meta_info["intentkv"]` of the answer; None from a server without intentkv.
    """

    answer: str
    right: bool
    seconds: float
    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int
    intentkv: dict[str, Any] | None


def play(
    session: Session,
    url: str,
    model: str = "default",
    params: dict[str, Any] | None = None,
    *,
    sglang: bool = True,
    forget: bool = False,
) -> Iterator[TurnResult]:
    """Yields the result of each turn of `session` on the server at `url` ("http://host:port"), at temperature 0.

    The model's own answers, right or wrong, become part of the history, as in an agent's loop. The same requests go to
    any SGLang server: `session_id`, `return_meta_info` and `no_stop_trim` are its own fields. `params` are custom parameters of every
    request, such as `intentkv_scorer`; each set of them makes a session of its own, and so does each sub-agent.
    `sglang=False` sends none of these fields, for other OpenAI-compatible servers, which might refuse them. `forget` gives
    every turn a `cache_salt` of its own, so that it finds nothing of the turns before it.

    Raises:
        openai.OpenAIError: the server refused a request, gave it up, or did not answer within TURN_SECONDS.
        ValueError: `session` wants answers under a regular expression, and the server is no SGLang.
    """
    if session.regex and not sglang:
        raise ValueError(f"{url} is no SGLang server, so nothing holds the answers of {session.name} to their form")
    client = connect(url)
    name = " ".join([session.name, *(f"{key}={value}" for key, value in sorted((params or {}).items()))])
    transcript = Transcript(session)
    for number, turn in enumerate(session.turns, start=1):
        prompt: Any = transcript.ask(turn)
        own: dict[str, Any] = {
            "session_id": branch_id(name, turn),
            "return_meta_info": True,
            "no_stop_trim": True,  # the next prompt then goes on from exactly what was generated
            "custom_params": params or {},
        }
        if session.regex:
            own["regex"] = session.regex
        if forget:
            own["cache_salt"] = f"{name} turn {number}"
        start = time.monotonic()
        reply = client.chat.completions.create(
            model=model,
            messages=prompt,
            temperature=0,
            max_tokens=session.answer_tokens,
            stop=session.stop,
            extra_body=own if sglang else None,
        )
        seconds = time.monotonic() - start
        choice = reply.choices[0]
        if choice.finish_reason not in ("stop", "length", "tool_calls"):
            raise openai.OpenAIError(f"the server gave the request up: finish_reason {choice.finish_reason!r}")
        answer = choice.message.content or ""
        counts = token_counts(reply)
        yield TurnResult(answer=answer, right=is_right(answer, turn.expected), seconds=seconds, **counts)
        transcript.answered(turn, answer)


def branch_id(session_id: str, turn: Turn) -> str:
    """The session id that a turn's requests carry: a sub-agent is a session of its own."""
    return f"{session_id} sub-agent {turn.branch}" if turn.branch else session_id


def server_url(text: str) -> str:
    """`http://host:port` of an address that may end as OpenAI clients want it, with /v1."""
    return text.rstrip("/").removesuffix("/v1")


def connect(url: str) -> openai.OpenAI:
    """A client of the server at `url` that asks once and waits TURN_SECONDS; the key is that of OPENAI_API_KEY, if any."""
    key = os.environ.get("OPENAI_API_KEY", "none")
    return openai.OpenAI(base_url=f"{url}/v1", api_key=key, timeout=TURN_SECONDS, max_retries=0)


def token_counts(reply: Any) -> dict[str, Any]:
    """The token counts and intentkv's report, from SGLang's meta_info or else from the usage that every server sends."""
    meta = (reply.choices[0].model_extra or {}).get("meta_info")
    if meta is not None:
        counts = {key: meta[key] for key in ("prompt_tokens", "completion_tokens", "cached_tokens")}
        return {**counts, "intentkv": meta.get("intentkv")}
    details = reply.usage.prompt_tokens_details
    return {
        "prompt_tokens": reply.usage.prompt_tokens,
        "completion_tokens": reply.usage.completion_tokens,
        "cached_tokens": (details.cached_tokens or 0) if details else 0,
        "intentkv": None,
    }


def flush_cache(url: str) -> bool:
    """Empties the prefix cache and the query memories of an SGLang server that is idle; False from any other server.

    Raises:
        RuntimeError: it is an SGLang server, and it could not flush.
    """
    request = urllib.request.Request(f"{url}/flush_cache?timeout=30", method="POST")
    try:
        with urllib.request.urlopen(request, timeout=60):
            return True
    except urllib.error.HTTPError as error:
        if error.code in (404, 405):
            return False
        raise RuntimeError(
            f"{url}/flush_cache answered {error.code}: {error.read().decode()!r}; is it idle?"
        ) from error
