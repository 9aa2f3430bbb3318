"""Sessions out of traces that people have: JSONL of OpenAI chats or of ToolBench, see `intentkv.train.traces`."""

from __future__ import annotations

import json
from pathlib import Path

from intentkv.evals.sessions import Message, Session, Turn, is_right
from intentkv.train.labels import argument_values
from intentkv.train.traces import Trace, TraceMessage, read_traces

CALL_TOKENS = 256


def recorded_sessions(path: Path, most: int | None = None) -> list[Session]:
    """A session for each trace in which a call needs what an older tool output said; the first `most` of them.

    Such a call is the turn's question: the model is right if its answer contains the first argument that occurs in a tool
    output from before the newest messages, and neither in these nor in the system prompt. Whatever it answers, the
    history goes on with what was recorded.

    Raises:
        intentkv.train.traces.TraceError: a line of the file is no trace.
        ValueError: no trace has such a call.
    """
    sessions = []
    for number, trace in enumerate(read_traces(path), start=1):
        session = _session(f"{path.stem}-{number}", trace)
        if session.turns:
            sessions.append(session)
        if len(sessions) == most:
            break
    if not sessions:
        raise ValueError(f"{path}: expected a call with an argument out of an older tool output, found none")
    return sessions


def _session(name: str, trace: Trace) -> Session:
    system = trace[0].content if trace and trace[0].role == "system" else ""
    turns: list[Turn] = []
    asked: list[str] = []
    pending: list[Message] = []  # since the last question
    newest = 0  # the first message after the last answer
    for i, message in enumerate(trace[1:] if system else trace, start=1 if system else 0):
        written = {"role": message.role, "content": _written(message)}
        if message.role != "assistant":
            pending.append(written)
            continue
        found = _needed(message, trace, newest, i)
        if found is None:
            pending.append(written)
        else:
            value, shown = found
            answers = sum(1 for other in trace[shown:i] if other.role == "assistant")
            turns.append(
                Turn(tuple(pending), value, answers, value in asked, as_argument=True, recorded=written["content"])
            )
            asked.append(value)
            pending = []
        newest = i + 1
    return Session(name, system, tuple(turns), answer_tokens=CALL_TOKENS, stop=None)


def _needed(answer: TraceMessage, trace: Trace, newest: int, end: int) -> tuple[str, int] | None:
    """The first argument of `answer`'s calls that only an older tool output told, and which message told it last."""
    seen = [message.content for message in trace[newest:end]]
    seen += [message.content for message in trace[:newest] if message.role == "system"]
    for value in (value for call in answer.calls for value in argument_values(call)):
        told = [k for k in range(newest) if trace[k].role == "tool" and is_right(trace[k].content, value)]
        if told and not any(is_right(text, value) for text in seen):
            return value, told[-1]
    return None


def _written(message: TraceMessage) -> str:
    """What a message says as text. Calls beside the text are written as Hermes models write them."""
    if message.calls_in_content or not message.calls:
        return message.content
    calls = []
    for call in message.calls:
        try:
            arguments = json.loads(call.arguments)
        except ValueError:
            arguments = call.arguments  # models write what is no JSON, too
        calls.append(f"<tool_call>\n{json.dumps({'name': call.name, 'arguments': arguments})}\n</tool_call>")
    return "\n".join([message.content, *calls] if message.content else calls)
