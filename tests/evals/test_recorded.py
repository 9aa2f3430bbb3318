"""Traces that people have become sessions: what a call needed of an older tool output is what is asked."""

import json
from pathlib import Path
from typing import Any

import pytest

from intentkv.evals.client import play
from intentkv.evals.recorded import recorded_sessions
from intentkv.evals.sessions import Transcript
from intentkv.train.generate import make_trace, to_toolbench
from intentkv.train.traces import TraceError
from intentkv.train.worlds import HARBOUR
from tests.evals.fake_server import fake_server


def call(name: str, **arguments: Any) -> dict[str, Any]:
    function = {"name": name, "arguments": json.dumps(arguments)}
    return {"role": "assistant", "content": None, "tool_calls": [{"id": "1", "function": function}]}


CHAT = {
    "messages": [
        {"role": "system", "content": "You are a clerk."},
        {"role": "user", "content": "Look up order 7713."},
        call("lookup", order="7713"),
        {"role": "tool", "content": "Order 7713: parcel walnut-93, paid by Nina Becker."},
        {"role": "assistant", "content": "Found it."},
        {"role": "user", "content": "And order 8820?"},
        call("lookup", order="8820"),
        {"role": "tool", "content": "Order 8820: parcel cedar-11."},
        call("label", parcel="cedar-11"),
        {"role": "tool", "content": "done"},
        {"role": "user", "content": "Now the label of the first one, and thank its payer."},
        call("label", parcel="walnut-93"),
        {"role": "tool", "content": "done"},
        call("mail", to="Nina Becker", about="walnut-93"),
    ]
}


def written(path: Path, *traces: Any) -> Path:
    path.write_text("".join(json.dumps(trace) + "\n" for trace in traces))
    return path


def test_a_turn_for_each_call_that_needs_an_older_tool_output(tmp_path: Path) -> None:
    """Arguments that the newest messages say, as `8820` and `cedar-11`, need no memory and are not asked."""
    (session,) = recorded_sessions(written(tmp_path / "desk.jsonl", CHAT))
    assert (session.name, session.system) == ("desk-1", "You are a clerk.")
    assert [(turn.expected, turn.age, turn.asked_before) for turn in session.turns] == [
        ("walnut-93", 3, False),
        ("Nina Becker", 4, False),
    ]
    assert [message["role"] for message in session.turns[0].messages].count("assistant") == 4
    assert session.turns[1].messages == ({"role": "tool", "content": "done"},)


def test_the_history_goes_on_with_what_was_recorded(tmp_path: Path) -> None:
    (session,) = recorded_sessions(written(tmp_path / "desk.jsonl", CHAT))
    transcript = Transcript(session)
    transcript.ask(session.turns[0])
    transcript.answered(session.turns[0], "I do not know.")
    prompt = transcript.ask(session.turns[1])
    assert [m["role"] for m in prompt] == [m["role"] for m in CHAT["messages"][:-1]]
    assert prompt[-2]["content"] == (
        '<tool_call>\n{"name": "label", "arguments": {"parcel": "walnut-93"}}\n</tool_call>'
    )
    assert not any("I do not know" in message["content"] for message in prompt)


def test_openai_chats_and_toolbench_ask_the_same(tmp_path: Path) -> None:
    """Six calls of a generated trace carry out what its records said; each is a turn, unless the newest record said it."""
    traces = [make_trace(HARBOUR, seed) for seed in range(3)]
    chats = recorded_sessions(written(tmp_path / "a.jsonl", *traces))
    bench = recorded_sessions(written(tmp_path / "b.jsonl", *(to_toolbench(trace) for trace in traces)))
    asked = [[(turn.expected, turn.age) for turn in session.turns] for session in chats]
    assert asked == [[(turn.expected, turn.age) for turn in session.turns] for session in bench]
    assert len(asked) == 3 and all(3 <= len(turns) <= 10 for turns in asked)
    assert len(recorded_sessions(tmp_path / "a.jsonl", most=2)) == 2


def test_a_file_that_is_one_list_reads_the_same(tmp_path: Path) -> None:
    """ToolBench publishes its answers as one list, over several lines or not."""
    traces = [to_toolbench(make_trace(HARBOUR, seed)) for seed in range(2)]
    lines = recorded_sessions(written(tmp_path / "a.jsonl", *traces))
    for indent in (None, 1):
        (tmp_path / "a.json").write_text(json.dumps(traces, indent=indent))
        assert recorded_sessions(tmp_path / "a.json") == lines
    (tmp_path / "b.json").write_text(json.dumps([CHAT, {"text": "x"}]))
    with pytest.raises(TraceError, match=r"b\.json, trace 2: expected an object"):
        recorded_sessions(tmp_path / "b.json")
    (tmp_path / "c.json").write_text("[{]")
    with pytest.raises(TraceError, match=r"c\.json: Expecting"):
        recorded_sessions(tmp_path / "c.json")


def test_calls_as_they_were_written_before_tools(tmp_path: Path) -> None:
    def old(message: dict[str, Any]) -> dict[str, Any]:
        if "tool_calls" in message:
            return {"role": "assistant", "content": None, "function_call": message["tool_calls"][0]["function"]}
        return {**message, "role": "function", "name": "desk"} if message["role"] == "tool" else message

    chat = {"messages": [old(message) for message in CHAT["messages"]]}
    assert recorded_sessions(written(tmp_path / "desk.jsonl", chat)) == recorded_sessions(
        written(tmp_path / "desk.jsonl", CHAT)
    )


def test_they_are_played_like_any_session(tmp_path: Path) -> None:
    """No stop at a full stop, and room for a call."""
    bodies: list[dict[str, Any]] = []

    def answer(body: dict[str, Any]) -> dict[str, Any]:
        bodies.append(body)
        message = {"role": "assistant", "content": '{"parcel": "walnut-93"}'}
        return {
            "id": "1", "object": "chat.completion", "created": 0, "model": "m",
            "choices": [{"index": 0, "message": message, "finish_reason": "stop"}],
            "usage": {"prompt_tokens": 5, "completion_tokens": 2, "total_tokens": 7},
        }  # fmt: skip

    (session,) = recorded_sessions(written(tmp_path / "desk.jsonl", CHAT))
    with fake_server(answer) as url:
        results = list(play(session, url, sglang=False))
    assert [result.right for result in results] == [True, False]
    assert [(body["max_tokens"], body.get("stop")) for body in bodies] == [(256, None)] * 2
    assert results[0].prompt_tokens == 5 and results[0].intentkv is None


def test_what_is_no_trace_or_asks_for_nothing_is_refused(tmp_path: Path) -> None:
    with pytest.raises(TraceError, match="line 2: expected an object"):
        recorded_sessions(written(tmp_path / "a.jsonl", CHAT, {"text": "x"}))
    with pytest.raises(ValueError, match="expected a call with an argument out of an older tool output"):
        recorded_sessions(written(tmp_path / "b.jsonl", {"messages": CHAT["messages"][:5]}))
