"""`intentkv doctor --server` against servers that are well, at fault, without intentkv, no SGLang, and not there."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from intentkv.cli import main

STATE = {"version": "0.1.0", "audit": [], "running": 0, "sessions": 3, "live_tokens": 40}
FAULT = "page 7: expected one owner, found 2 (free list, tree)"


@contextmanager
def server(status: int, body: bytes) -> Iterator[str]:
    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            found = self.path == "/server_info"
            self.send_response(status if found else 404)
            self.end_headers()
            self.wfile.write(body if found else b"")

        def log_message(self, *_: Any) -> None:
            pass

    listener = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=listener.serve_forever)
    thread.start()
    try:
        yield f"http://127.0.0.1:{listener.server_port}"
    finally:
        listener.shutdown()
        thread.join()
        listener.server_close()


def doctor(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, dict[str, Any]]:
    status = main(["doctor", "--json", "--server", *arguments])
    return status, json.loads(capsys.readouterr().out)


def states(*of_schedulers: dict[str, Any]) -> bytes:
    return json.dumps({"version": "0.5.23", "internal_states": of_schedulers}).encode()


def test_a_server_that_is_well(capsys: pytest.CaptureFixture[str]) -> None:
    with server(200, states({"world_size": 1, "intentkv": STATE})) as url:
        assert doctor(capsys, url) == (0, {"server": url, "schedulers": [STATE], "reasons": []})
        assert main(["doctor", "--server", f"{url}/"]) == 0
    said = capsys.readouterr().out
    assert "every slot has one owner" in said and "sessions" in said and "0 faults" in said


def test_faults_are_listed_by_scheduler(capsys: pytest.CaptureFixture[str]) -> None:
    with server(200, states({"intentkv": STATE}, {"intentkv": {**STATE, "audit": [FAULT]}})) as url:
        status, said = doctor(capsys, url)
        assert (status, said["reasons"], len(said["schedulers"])) == (1, [f"scheduler 1: {FAULT}"], 2)
        assert main(["doctor", "--server", url]) == 1
    assert "not well" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("status", "body", "reason"),
    [
        (200, states({"world_size": 1}), "runs without intentkv: start the server with --enable-intentkv"),
        (200, b"{}", "names no scheduler"),
        (200, b"[1]", "names no scheduler"),
        (200, b"<html>", "cannot be asked"),
        (401, b"", "answered 401 Unauthorized"),
        (404, b"", "answered 404 Not Found"),
    ],
)
def test_a_server_that_cannot_tell(capsys: pytest.CaptureFixture[str], status: int, body: bytes, reason: str) -> None:
    with server(status, body) as url:
        found, said = doctor(capsys, url)
    assert found == 1 and said["schedulers"] == []
    (line,) = said["reasons"]
    assert reason in line


def test_no_server_at_all(capsys: pytest.CaptureFixture[str]) -> None:
    with server(200, b"") as gone:
        pass
    for url in (gone, "localhost:30000", "http://127.0.0.1:nine"):
        status, said = doctor(capsys, url)
        assert status == 1 and "cannot be asked" in said["reasons"][0]


def test_one_question_at_a_time() -> None:
    with pytest.raises(SystemExit, match="got both"):
        main(["doctor", "--server", "http://127.0.0.1:1", "--", "--model-path", "M"])
