"""An OpenAI-compatible server in this process that answers as a function of the request, with intentkv's reports."""

import hashlib
import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

REPORT = ("events", "freed_slots", "score_ms")


def reply(body: dict[str, Any]) -> dict[str, Any]:
    """Says the fact that was asked for, but for the prompts whose hash says no: more often for some scorers than others."""
    params = body["custom_params"]
    scorer = params.get("intentkv_scorer", "")
    asked = body["messages"][-1]["content"].partition("What is the ")[2].partition("?")[0]
    text = " ".join(message["content"] for message in body["messages"] if message["role"] == "tool")
    value = text.partition(f"The {asked} is ")[2].partition(".")[0]
    draw = hashlib.sha256(json.dumps([body["messages"], scorer]).encode()).digest()[0]
    words = len(json.dumps(body["messages"]).split())
    live = min(words, params["intentkv_budget"]) if scorer else words
    forgets = 0 if not scorer else 64 if scorer == "intent" else 160
    meta: dict[str, Any] = {"prompt_tokens": words, "completion_tokens": 8, "cached_tokens": words // 2}
    if scorer:
        meta["intentkv"] = {"live_tokens": live, "logical_tokens": words + 8, **dict.fromkeys(REPORT, 1)}
    answer = f"The {asked} is {value}." if draw >= forgets else "I do not know."
    message = {"role": "assistant", "content": answer}
    return {
        "id": "1", "object": "chat.completion", "created": 0, "model": "fake",
        "choices": [{"index": 0, "message": message, "finish_reason": "stop", "meta_info": meta}],
        "usage": {"prompt_tokens": words, "completion_tokens": 8, "total_tokens": words + 8},
    }  # fmt: skip


@contextmanager
def fake_server(answer: Callable[[dict[str, Any]], dict[str, Any] | int] = reply) -> Iterator[str]:
    """Yields the url. `answer` makes the reply to a request's body, or an HTTP status to refuse it with."""

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
            made = {} if self.path.startswith("/flush_cache") else answer(json.loads(body))
            status, content = (made, {"message": "refused"}) if isinstance(made, int) else (200, made)
            data = json.dumps(content).encode()
            self.send_response(status)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        def log_message(self, *_: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
