"""Multi-turn tool-call traces in one form, read from OpenAI chat and ToolBench-like JSONL."""

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from intentkv.checks import shown

ROLES = {
    "system": "system",
    "developer": "system",
    "user": "user",
    "human": "user",
    "assistant": "assistant",
    "gpt": "assistant",
    "tool": "tool",
    "function": "tool",
    "observation": "tool",
}
# ToolBench writes a call into the answer's text.
_ACTION = re.compile(r"Action:[ \t]*(?P<name>[^\n]+)\n+Action Input:[ \t\n]*(?P<arguments>.*)", re.DOTALL)


class TraceError(ValueError):
    """What was read is no trace; the message says what was expected, and where."""


@dataclass(frozen=True)
class Call:
    """One tool call. `arguments` is its JSON text, as it was sent."""

    name: str
    arguments: str


@dataclass(frozen=True)
class TraceMessage:
    """One message; `content` may be empty where `calls` are not.

    `calls_in_content`: the calls are part of `content` (ToolBench), so that nothing else has to write them.
    """

    role: str
    content: str
    calls: tuple[Call, ...] = ()
    calls_in_content: bool = False


Trace = tuple[TraceMessage, ...]


def read_traces(path: Path) -> Iterator[Trace]:
    """The traces of a file: OpenAI chat (`messages`) or ToolBench-like (`conversations`).

    One a line, or all in one list, as ToolBench publishes its own.

    Raises TraceError naming line (or place in the list) and reason at the first that is neither.
    """
    with open(path, "rb") as file:
        if file.read(1) == b"[":
            yield from _listed(path)
            return
        file.seek(0)
        for number, line in enumerate(file, 1):
            if line.strip():
                try:
                    yield parse_trace(json.loads(line))
                except (ValueError, RecursionError) as error:  # RecursionError: brackets without end
                    raise TraceError(f"{path}, line {number}: {error}") from None


def _listed(path: Path) -> Iterator[Trace]:
    try:
        whole = json.loads(path.read_bytes())
    except (ValueError, RecursionError) as error:
        raise TraceError(f"{path}: {error}") from None
    for number, raw in enumerate(whole, 1):
        try:
            yield parse_trace(raw)
        except ValueError as error:
            raise TraceError(f"{path}, trace {number}: {error}") from None


def parse_trace(raw: object) -> Trace:
    """One trace from its JSON object. Raises TraceError saying what was expected."""
    if isinstance(raw, dict) and isinstance(raw.get("messages"), list):
        return tuple(_openai_message(message) for message in raw["messages"])
    if isinstance(raw, dict) and isinstance(raw.get("conversations"), list):
        return tuple(_toolbench_message(message) for message in raw["conversations"])
    raise TraceError("expected an object with a list `messages` (OpenAI chat) or `conversations` (ToolBench)")


def _openai_message(raw: Any) -> TraceMessage:
    role = _role(raw, "role")
    content = raw.get("content") or ""
    if isinstance(content, list):  # parts; only text takes part in a match
        parts = [part.get("text", "") for part in content if isinstance(part, dict)]
        content = "".join(_text(part, "text of a part of content") for part in parts)
    elif not isinstance(content, str):
        raise TraceError(f"content: expected a text or a list of parts, got {type(content).__name__}")
    calls = raw.get("tool_calls") or []
    if not isinstance(calls, list):
        raise TraceError(f"tool_calls: expected a list, got {type(calls).__name__}")
    if raw.get("function_call"):  # how calls were written before there were tools
        calls = [*calls, {"function": raw["function_call"]}]
    return TraceMessage(role, _text(content, "content"), tuple(_openai_call(call) for call in calls))


def _openai_call(raw: Any) -> Call:
    function = raw.get("function") if isinstance(raw, dict) else None
    if not isinstance(function, dict) or "name" not in function:
        raise TraceError("tool_calls: expected objects with function.name and function.arguments")
    arguments = function.get("arguments", "{}")
    arguments = arguments if isinstance(arguments, str) else json.dumps(arguments)
    return Call(_text(function["name"], "function.name"), _text(arguments, "function.arguments"))


def _toolbench_message(raw: Any) -> TraceMessage:
    role = _role(raw, "from")
    content = _text(raw.get("value"), "value")
    action = _ACTION.search(content) if role == "assistant" else None
    calls = () if action is None else (Call(action["name"].strip(), action["arguments"].strip()),)
    return TraceMessage(role, content, calls, calls_in_content=True)


def _role(raw: Any, key: str) -> str:
    role = raw.get(key) if isinstance(raw, Mapping) else None
    if not isinstance(role, str) or role not in ROLES:
        raise TraceError(f"{key}: expected one of {', '.join(ROLES)}, got {shown(role)}")
    return ROLES[role]


def _text(raw: object, where: str) -> str:
    if not isinstance(raw, str):
        raise TraceError(f"{where}: expected a text, got {type(raw).__name__}")
    try:
        raw.encode()
    except UnicodeEncodeError:
        raise TraceError(
            f"{where}: expected a text, got half a surrogate pair in it, which no tokenizer reads"
        ) from None
    return raw
