"""Plays a BFCL case against an OpenAI-compatible server: the model calls tools, simulators answer, until it has no more calls."""

from __future__ import annotations

import json
import time
from dataclasses import dataclass, field
from typing import Any

import openai

from intentkv.evals.bfcl_cases import Case, CaseTurn
from intentkv.evals.bfcl_world import Call, World
from intentkv.evals.client import connect, token_counts
from intentkv.evals.runner import require_report, token_sample

Sample = dict[str, Any]


def play_case(
    case: Case, *, url: str, model: str, params: dict[str, Any], max_tokens: int, sglang: bool
) -> dict[str, Any]:
    """`right` (bfcl's verdict), `wrong` (why not, in bfcl's words or the server's; "" if right) and `turns`, one sample each.

    A turn ends with an answer that has no call, or one whose arguments are no JSON object; after more than bfcl's limit
    of steps the case is given up. A turn that was given up or refused, and all after it, are not completed. A sample's
    tokens are those of all its requests, but for logical and live ones: they are what the turn ends with.

    Raises:
        openai.APIConnectionError: nobody is there.
        ValueError: the server has no intentkv, and `params` ask for a scorer.
    """
    name = " ".join([case.name, *(f"{key}={value}" for key, value in sorted(params.items()))])
    own = {"session_id": name, "return_meta_info": True, "custom_params": params} if sglang else None
    ask = {"model": model, "temperature": 0, "max_tokens": max_tokens, "extra_body": own}
    samples = [_nothing_done() for _ in case.turns]
    with World(case) as world, connect(url) as client:
        dialogue = _Dialogue(client, url, ask, params, world)
        wrong = ""
        for turn, sample in zip(case.turns, samples, strict=True):
            wrong = dialogue.play(turn, sample)
            if wrong:
                break
        else:
            wrong = world.verdict([sample["calls"] for sample in samples])
    return {"right": not wrong, "wrong": wrong, "turns": samples}


def _nothing_done() -> Sample:
    return {"completed": False, "requests": 0, "calls": [], "answer": ""}


@dataclass
class _Dialogue:
    """A conversation under way; `ask` are the fields that all its requests share, `history` its messages so far."""

    client: openai.OpenAI
    url: str
    ask: dict[str, Any]
    params: dict[str, Any]
    world: World
    history: list[dict[str, Any]] = field(default_factory=list)

    def play(self, turn: CaseTurn, sample: Sample) -> str:
        """Plays `turn`, and adds what it brought to `sample`. Returns why it was given up, "" if it was not."""
        from bfcl_eval.constants.default_prompts import MAXIMUM_STEP_LIMIT

        self.history += turn.messages
        while len(sample["calls"]) <= MAXIMUM_STEP_LIMIT:
            try:
                message = self._answer(turn, sample)
            except openai.APITimeoutError as error:
                return str(error)
            except openai.APIConnectionError:
                raise  # nobody there: not this configuration's fault, and no result
            except openai.OpenAIError as error:
                return str(error)
            if not self._carried_out(message, sample):
                sample |= {"completed": True, "answer": message.content or ""}
                return ""
        return f"more than {MAXIMUM_STEP_LIMIT} steps in a turn"

    def _answer(self, turn: CaseTurn, sample: Sample) -> Any:
        """The model's next message."""
        start = time.monotonic()
        tools: Any = list(turn.tools)
        messages: Any = list(self.history)
        reply = self.client.chat.completions.create(messages=messages, tools=tools, **self.ask)
        choice = reply.choices[0]
        if choice.finish_reason not in ("stop", "length", "tool_calls"):
            raise openai.OpenAIError(f"the server gave the request up: finish_reason {choice.finish_reason!r}")
        counts = token_counts(reply)
        require_report(counts["intentkv"], self.params, self.url)
        sample["requests"] += 1
        for key, value in token_sample(counts, time.monotonic() - start).items():
            held = key in ("logical_tokens", "live_tokens")
            sample[key] = value if held else round(sample.get(key, 0) + value, 3)
        return choice.message

    def _carried_out(self, message: Any, sample: Sample) -> bool:
        """Whether `message` had calls; they have been executed then, and their results are in the history."""
        calls = _calls(message)
        said = {"role": "assistant", "content": message.content or ""}
        if not calls:
            self.history.append(said)
            return False
        kept = [call.model_dump(include={"id", "type", "function"}) for call in message.tool_calls]
        self.history.append({**said, "tool_calls": kept})
        written, results = self.world.run(calls)
        sample["calls"].append(written)
        self.history += [
            {"role": "tool", "tool_call_id": call["id"], "content": result}
            for call, result in zip(kept, results, strict=True)
        ]
        return True


def _calls(message: Any) -> list[Call]:
    """The calls of an answer; none if the arguments of one are no JSON object, as bfcl has it."""
    calls = []
    for call in message.tool_calls or []:
        try:
            arguments = json.loads(call.function.arguments)
        except ValueError:
            return []
        if not isinstance(arguments, dict):
            return []
        calls.append((call.function.name, arguments))
    return calls
