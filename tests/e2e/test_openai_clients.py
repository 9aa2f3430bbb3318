"""Clients of the OpenAI API, unchanged: the openai package, streaming, tools, plain HTTP. Then what the server told of them.

One server of a tiny random model for all of them: what it says means nothing, how it says it is what clients rely on.
"""

from __future__ import annotations

import asyncio
import json
import re
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest

from intentkv.evals.model import tiny_checkpoint
from intentkv.evals.server import Server
from intentkv.report.command import write_report
from tests.report.chromium import Browser, find_chromium
from tests.unit.test_metrics_dashboard import CONTRACT

NOTE = "The quarterly review of the north depot was uneventful and the minutes were filed by the clerk. "
SYSTEM = {"role": "system", "content": "You are a clerk."}
TOOLS: Any = [
    {
        "type": "function",
        "function": {
            "name": "load_record",
            "description": "Load a record.",
            "strict": True,
            "parameters": {
                "type": "object",
                "properties": {"title": {"type": "string", "enum": ["ledger", "journal"]}},
                "required": ["title"],
                "additionalProperties": False,  # or a random model adds keys until its tokens run out
            },
        },
    }
]
# One call and no more: a random model would begin the next one until its tokens run out.
CHOICE: Any = {"type": "function", "function": {"name": "load_record"}}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_checkpoint(tmp_path_factory.mktemp("models") / "tiny")


@pytest.fixture(scope="module")
def trace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("trace")


@pytest.fixture
def server(servers: Any, model: Path, trace: Path) -> Server:
    return servers.get(
        *("--enable-intentkv", "--intentkv-budget", "25%", "--intentkv-trigger", "64", "--intentkv-trace", str(trace)),
        *("--enable-metrics", "--tool-call-parser", "qwen", "--constrained-json-disable-any-whitespace"),
        model=model,
    )


@pytest.fixture
def client(server: Server) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", timeout=120, max_retries=0) as one:
        yield one


def ask(number: int) -> dict[str, str]:
    return {"role": "user", "content": NOTE * 12 + f"That was note {number}. What do you say?"}


def test_a_conversation_with_extra_body(client: openai.OpenAI) -> None:
    """Four turns of one session: it shrinks, it says so, and it stays one conversation for the client."""
    messages: list[Any] = [SYSTEM]
    for number in range(4):
        messages.append(ask(number))
        reply = client.chat.completions.create(
            model="default", messages=messages, temperature=0, max_tokens=8,
            extra_body={"session_id": "talk", "custom_params": {"intentkv_budget": "20%"}, "return_meta_info": True},
        )  # fmt: skip
        told = reply.choices[0].model_extra["meta_info"]["intentkv"]
        assert reply.usage is not None and told["logical_tokens"] == reply.usage.total_tokens
        assert (told["session"], told["budget"]) == ("talk", "20%")
        messages.append({"role": "assistant", "content": reply.choices[0].message.content or ""})
    assert told["dropped_tokens"] > 500 and told["live_tokens"] < told["logical_tokens"] / 2


def test_a_client_that_knows_nothing_of_it(client: openai.OpenAI) -> None:
    """No field of ours: a session found by its beginning, and an answer of the usual shape."""
    messages: Any = [SYSTEM, ask(0)]
    reply = client.chat.completions.create(model=client.models.list().data[0].id, messages=messages, max_tokens=4)
    assert reply.choices[0].message.content and reply.choices[0].finish_reason == "length"
    assert "meta_info" not in (reply.choices[0].model_extra or {})


def test_streaming_says_the_same(client: openai.OpenAI) -> None:
    """Streamed and whole answers of two sessions with the same pruned history.

    Neither finds anything in the cache: the first token behind a prefix found there has no surprise, and in text as even as
    this one word decides which sentences stay.
    """
    said = []
    for stream in (False, True):
        messages: Any = [SYSTEM]
        for number in range(2):
            messages.append(ask(number))
            extra = {"session_id": f"stream {stream}", "cache_salt": f"stream {stream}"}
            if not stream:
                reply = client.chat.completions.create(
                    model="m", messages=messages, temperature=0, max_tokens=8, extra_body=extra
                )
                text, tokens = reply.choices[0].message.content or "", reply.usage.total_tokens
            else:
                chunks = list(
                    client.chat.completions.create(
                        model="m", messages=messages, temperature=0, max_tokens=8, extra_body=extra, stream=True,
                        stream_options={"include_usage": True},
                    )
                )  # fmt: skip
                text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
                tokens = chunks[-1].usage.total_tokens
                assert len(chunks) > 3
            said.append((text, tokens))
            messages.append({"role": "assistant", "content": text})
    assert said[:2] == said[2:]


def tool_session(client: openai.OpenAI, session: str, **params: Any) -> list[dict[str, Any]]:
    """A forced call and its result, then two more records and questions; what intentkv told of each turn."""
    messages: list[Any] = [SYSTEM, {"role": "user", "content": "Load the ledger."}]
    told = []
    for number in range(3):
        forced: dict[str, Any] = {"tool_choice": CHOICE, "max_tokens": 200} if number == 0 else {"max_tokens": 8}
        reply = client.chat.completions.create(
            model="m", messages=messages, tools=TOOLS, temperature=0, **forced,
            extra_body={"session_id": session, "return_meta_info": True, "custom_params": params},
        )  # fmt: skip
        choice = reply.choices[0]
        told.append(choice.model_extra["meta_info"]["intentkv"])
        messages.append(choice.message.model_dump(exclude_none=True))
        if number == 0:
            call = choice.message.tool_calls[0]
            assert call.function.name == "load_record"
            assert json.loads(call.function.arguments)["title"] in ("ledger", "journal")
            messages.append({"role": "tool", "tool_call_id": call.id, "content": NOTE * 12})
        else:
            messages.append(ask(number))
    return told


def test_tools(client: openai.OpenAI) -> None:
    """A call is parsed by SGLang, its result remembered by the session, and dropped when it is history."""
    assert tool_session(client, "tools")[2]["dropped_tokens"] > 64


def test_actkv_follows_the_calls(client: openai.OpenAI) -> None:
    """Regions found in what the model writes, keep scores over turns, a budget of tokens and one of auto."""
    told = tool_session(client, "actkv", intentkv_scorer="actkv", intentkv_budget=64)
    assert told[0]["action_regions"] >= 1
    assert told[2]["dropped_tokens"] > 64 and sum(told[2]["access"].values()) > 0
    told = tool_session(client, "auto", intentkv_scorer="actkv", intentkv_budget="auto")
    assert told[2]["budget"] == "auto" and told[2]["budget_tokens"] >= 512


def test_streamed_tool_call(client: openai.OpenAI) -> None:
    messages: Any = [SYSTEM, {"role": "user", "content": "Load the journal."}]
    parts = [
        call.function
        for chunk in client.chat.completions.create(
            model="m", messages=messages, tools=TOOLS, tool_choice=CHOICE, temperature=0, max_tokens=200, stream=True,
            extra_body={"session_id": "streamed tools"},
        )
        for choice in chunk.choices
        for call in choice.delta.tool_calls or []
    ]  # fmt: skip
    assert next(part.name for part in parts if part.name) == "load_record"
    assert set(json.loads("".join(part.arguments or "" for part in parts))) == {"title"}


def test_many_at_once_as_agent_frameworks_do(server: Server) -> None:
    """LangChain and others keep `extra_body` in their model object and call the async client, several at a time."""
    kept = {"model": "m", "temperature": 0.0, "max_tokens": 4, "n": 1, "stream": False}

    async def talk(client: openai.AsyncOpenAI, number: int) -> list[dict[str, Any]]:
        messages: list[Any] = [SYSTEM]
        told = []
        for turn in range(2):
            messages.append(ask(100 * number + turn))
            reply = await client.chat.completions.create(
                **kept, messages=messages, extra_body={"session_id": f"agent {number}", "return_meta_info": True}
            )
            told.append(reply.choices[0].model_extra["meta_info"]["intentkv"])
            messages.append({"role": "assistant", "content": reply.choices[0].message.content or ""})
        return told

    async def everybody() -> list[list[dict[str, Any]]]:
        async with openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
            return await asyncio.gather(*(talk(client, number) for number in range(4)))

    for number, told in enumerate(asyncio.run(everybody())):
        assert {turn["session"] for turn in told} == {f"agent {number}"}
        # The first prompt is system and newest message, which are always kept.
        assert told[0]["dropped_tokens"] == 0 < told[1]["dropped_tokens"]
        assert told[1]["reused_prefix_tokens"] > 0


def test_text_completions(client: openai.OpenAI) -> None:
    reply = client.completions.create(
        model="m", prompt=NOTE * 30, max_tokens=4, extra_body={"session_id": "text", "return_meta_info": True}
    )
    assert reply.choices[0].text and reply.usage is not None and reply.usage.completion_tokens == 4


def test_a_bad_field_is_the_clients_error_and_names_it(client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError, match="intentkv_budgit: unknown key; the nearest is intentkv_budget"):
        client.chat.completions.create(
            model="m",
            messages=[{"role": "user", "content": "Hi"}],
            extra_body={"custom_params": {"intentkv_budgit": 1}},
        )
    with pytest.raises(openai.BadRequestError, match="not supported with streaming"):
        client.chat.completions.create(
            model="m", messages=[{"role": "user", "content": "Hi"}], stream=True, extra_body={"return_meta_info": True}
        )


def test_plain_http(server: Server) -> None:
    messages = [SYSTEM, ask(0), {"role": "assistant", "content": "Nothing."}, ask(1)]
    body = {"model": "m", "messages": messages, "max_tokens": 4, "session_id": "http", "return_meta_info": True}
    with urllib.request.urlopen(post(server, "/v1/chat/completions", body), timeout=120) as answer:
        told = json.load(answer)["choices"][0]["meta_info"]["intentkv"]
    assert told["session"] == "http" and told["dropped_tokens"] > 0
    streamed = {**body, "stream": True, "return_meta_info": False}
    with urllib.request.urlopen(post(server, "/v1/chat/completions", streamed), timeout=120) as answer:
        lines = [line.decode().strip() for line in answer if line.strip()]
    assert lines[-1] == "data: [DONE]" and all(line.startswith("data: ") for line in lines)
    assert sum("content" in line for line in lines) >= 2
    native = {
        "text": NOTE * 30,
        "sampling_params": {"max_new_tokens": 2, "custom_params": {"intentkv_session": "native"}},
    }
    with urllib.request.urlopen(post(server, "/generate", native), timeout=120) as answer:
        assert json.load(answer)["meta_info"]["intentkv"]["session"] == "native"


def test_a_client_that_hangs_up_harms_nobody(client: openai.OpenAI) -> None:
    for _ in range(3):
        stream = client.chat.completions.create(
            model="m", messages=[SYSTEM, ask(0)], stream=True, max_tokens=400, extra_body={"session_id": "gone"}
        )
        next(iter(stream))
        stream.close()
    reply = client.chat.completions.create(model="m", messages=[SYSTEM, ask(0)], max_tokens=2)
    assert reply.choices[0].finish_reason == "length"


def test_docs_snippets_run(client: openai.OpenAI) -> None:
    """Every Python snippet of README and docs that talks to a server, run as it stands but for the length of the answer."""
    root = Path(__file__).resolve().parents[2]
    snippets = [
        (path.name, snippet)
        for path in (root / "README.md", *sorted((root / "docs").glob("*.md")))
        for snippet in re.findall(r"```python\n(.*?)```", path.read_text(), re.DOTALL)
        if "client.chat" in snippet
    ]
    assert snippets
    for name, snippet in snippets:
        scope: dict[str, Any] = {"client": client, "messages": [SYSTEM, ask(0)], "agent": "agent-7", "turn": 3}
        snippet = snippet.replace("completions.create(", "completions.create(max_tokens=8, ")
        snippet = re.sub(r"http://\S+?/v1", str(client.base_url), snippet)
        exec(compile(snippet, name, "exec"), scope)  # noqa: S102 (our own documentation)


def test_metrics_are_those_of_the_contract(server: Server) -> None:
    with urllib.request.urlopen(server.url + "/metrics", timeout=60) as answer:
        names = set(re.findall(r"^(intentkv_\w+)", answer.read().decode(), re.MULTILINE))
    assert names == CONTRACT


@pytest.mark.skipif(find_chromium() is None, reason="needs Chromium: apt-get install chromium")
def test_the_report_of_all_this(server: Server, model: Path, trace: Path, tmp_path: Path) -> None:
    """The trace of this very server as a page: the dropped tokens of a session's last turn are there to see."""
    page = write_report(trace, tmp_path / "report.html", str(model), "talk")
    program = find_chromium()
    assert program is not None
    browser = Browser(program, tmp_path / "profile")
    try:
        browser.open(page)
        assert browser.requests == [page.as_uri()] and browser.errors == []
        last = browser.js("[...document.querySelectorAll('#s1 [data-g=\"4\"]')].map(run => run.textContent).join('')")
        assert len(last) > 100 and "depot" in last
        assert browser.js("document.querySelector('#s1').dataset.turns") == "4"
    finally:
        browser.close()


def post(server: Server, path: str, body: dict[str, Any]) -> urllib.request.Request:
    return urllib.request.Request(server.url + path, json.dumps(body).encode(), {"Content-Type": "application/json"})
