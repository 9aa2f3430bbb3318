"""Plays an agent session against an OpenAI-compatible server, with the `openai` client that agents use."""

import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import openai

from intentkv.evals.sessions import Message, Session, is_right

ANSWER_TOKENS = 24
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
    session: Session, url: str, model: str = "default", params: dict[str, Any] | None = None
) -> Iterator[TurnResult]:
    """Yields the result of each turn of `session` on the server at `url` ("http://host:port"), at temperature 0.

    The model's own answers, right or wrong, become part of the history, as in an agent's loop. The same requests go to
    any server: `session_id` and `return_meta_info` are SGLang's own fields. `params` are custom parameters of every
    request, such as `intentkv_scorer`; each set of them makes a session of its own.

    Raises:
        openai.OpenAIError: the server refused a request, or did not answer within TURN_SECONDS.
    """
    client = openai.OpenAI(base_url=f"{url}/v1", api_key="none", timeout=TURN_SECONDS, max_retries=0)
    session_id = " ".join([session.name, *(f"{name}={value}" for name, value in sorted((params or {}).items()))])
    messages: list[Message] = [{"role": "system", "content": session.system}]
    for turn in session.turns:
        messages += turn.messages
        start = time.monotonic()
        reply = client.chat.completions.create(
            model=model,
            messages=messages,
            temperature=0,
            max_tokens=ANSWER_TOKENS,
            extra_body={"session_id": session_id, "return_meta_info": True, "custom_params": params or {}},
        )
        seconds = time.monotonic() - start
        choice = reply.choices[0]
        answer = choice.message.content or ""
        meta = choice.model_extra["meta_info"]
        yield TurnResult(
            answer=answer,
            right=is_right(answer, turn.expected),
            seconds=seconds,
            prompt_tokens=meta["prompt_tokens"],
            completion_tokens=meta["completion_tokens"],
            cached_tokens=meta["cached_tokens"],
            intentkv=meta.get("intentkv"),
        )
        messages.append({"role": "assistant", "content": answer})
