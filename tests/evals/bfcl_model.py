"""A model that knows a BFCL case's true calls: the answers of a fake server, made from the messages of a request alone."""

import ast
import json
from collections.abc import Callable, Sequence
from typing import Any

from intentkv.evals.bfcl_cases import Case

Calls = list[tuple[str, dict[str, Any]]]


def true_calls(case: Case, body: dict[str, Any]) -> Calls:
    """Every true call of the turn that `body` is in, in its first answer; then none."""
    roles = [message["role"] for message in body["messages"]]
    if roles[-1] == "tool":
        return []
    said = sum(len(turn.messages) for turn in case.turns[:1])
    turn = 0
    while said < roles.count("user"):
        turn += 1
        said += len(case.turns[turn].messages)
    return [_parsed(call, body["tools"]) for call in case.truth[turn]]


def _parsed(call: str, tools: list[dict[str, Any]]) -> tuple[str, dict[str, Any]]:
    """A call that is written as Python; arguments without names are named after the tool's properties, in their order."""
    node: Any = ast.parse(call, mode="eval").body
    names = [word.arg for word in node.keywords]
    if node.args:
        (about,) = (tool["function"] for tool in tools if tool["function"]["name"] == node.func.id)
        names = [*list(about["parameters"]["properties"])[: len(node.args)], *names]
    values = [ast.literal_eval(value) for value in [*node.args, *(word.value for word in node.keywords)]]
    return node.func.id, dict(zip(names, values, strict=True))


def answering(
    cases: Sequence[Case], calls: Callable[[Case, dict[str, Any]], Calls] = true_calls, raw: str | None = None
) -> Callable[[dict[str, Any]], dict[str, Any]]:
    """Answers of a server with intentkv. `raw` replaces the arguments of every call as they are written."""
    by_name = {case.name: case for case in cases}

    def answer(body: dict[str, Any]) -> dict[str, Any]:
        made = calls(by_name[body["session_id"].split()[0]], body)
        words = len(json.dumps(body["messages"]).split())
        meta: dict[str, Any] = {"prompt_tokens": words, "completion_tokens": 8, "cached_tokens": words // 2}
        if "intentkv_scorer" in body["custom_params"]:
            meta["intentkv"] = {"live_tokens": words // 2, "events": 1, "freed_slots": 1, "score_ms": 1.0}
        asked = [
            {
                "id": f"call-{n}",
                "type": "function",
                "index": n,
                "function": {"name": name, "arguments": json.dumps(arguments) if raw is None else raw},
            }
            for n, (name, arguments) in enumerate(made)
        ]
        message = {"role": "assistant", "content": None if asked else "Done.", "tool_calls": asked or None}
        finish = "tool_calls" if asked else "stop"
        return {
            "id": "1", "object": "chat.completion", "created": 0, "model": "fake",
            "choices": [{"index": 0, "message": message, "finish_reason": finish, "meta_info": meta}],
            "usage": {"prompt_tokens": words, "completion_tokens": 8, "total_tokens": words + 8},
        }  # fmt: skip

    return answer
