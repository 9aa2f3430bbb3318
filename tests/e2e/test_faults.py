"""A real server under faults of its clients and its operator: after each one the pool is sound, and nobody else's answers
have changed.

The server retracts requests for the sake of it and checks its pool while it is busy. What the agents say without any fault
is what the same server says when nothing else goes on; `test_fault_killed_and_started_anew` shows that a server without a
single retraction says the same.
"""

from __future__ import annotations

import contextlib
import functools
import http.client
import json
import time
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from intentkv.evals.load import read_metrics
from intentkv.evals.server import Server
from tests.e2e.agents import (
    LONG,
    TURNS,
    Talk,
    abort_after,
    agents,
    busy,
    check_sound,
    nothing_lost,
    play,
    play_through,
    post,
    victim,
    wait_until,
    was_aborted,
)

ABORTED = "sglang:num_aborted_requests_total"


def stream(server: Server, talk: Talk, lines: int) -> None:
    """Read `lines` of a long streamed answer, then hang up."""
    body = talk.body(LONG, 2000, stream=True, return_meta_info=False)
    data = json.dumps(body).encode()
    request = urllib.request.Request(server.url + "/v1/chat/completions", data, {"Content-Type": "application/json"})
    with contextlib.closing(urllib.request.urlopen(request, timeout=120)) as answer:
        for _ in range(lines):
            assert answer.readline()


def give_up(server: Server, talk: Talk, seconds: float) -> None:
    """A client that waits so long for a whole answer, then closes its socket."""
    connection = http.client.HTTPConnection(server.url.removeprefix("http://"), timeout=seconds)
    data = json.dumps(talk.body(LONG, 2000)).encode()
    connection.request("POST", "/v1/chat/completions", data, {"Content-Type": "application/json"})
    with contextlib.closing(connection), pytest.raises(TimeoutError):
        connection.getresponse()


def test_fault_clients_disconnect(storm: Server, expected: Any) -> None:
    """While a stream runs, and during prefill and decode of an answer that is awaited whole."""

    def hang_up() -> None:
        with ThreadPoolExecutor(6) as threads:
            going = [threads.submit(stream, storm, victim(f"stream {n}"), 2 * n + 1) for n in range(3)]
            going += [threads.submit(give_up, storm, victim(f"whole {n}"), 0.1 + 0.4 * n) for n in range(3)]
            for one in going:
                one.result()

    aborted = read_metrics(storm.url).get(ABORTED, 0.0)
    with nothing_lost(storm):
        talks = play_through(storm, "disconnect", hang_up)
    assert read_metrics(storm.url)[ABORTED] == aborted + 6
    assert [talk.proofs() for talk in talks] == expected
    assert victim("stream 0").ask(storm, "Still there?").cached > 300, "the session goes on with what it had"


def test_fault_aborts_at_any_moment(storm: Server, expected: Any) -> None:
    """Before the first chunk, between chunks, in decode: how far each got is seen in what its session finds afterwards."""
    found: dict[str, list[float]] = {"nothing": [], "chunks": [], "all": []}

    def abort() -> None:
        wait = 0.0
        for number in range(30):
            talk = victim(f"abort {number}", f"abort {number}")
            assert was_aborted(abort_after(storm, talk, f"abort-{number}", functools.partial(time.sleep, wait)))
            probe = talk.ask(storm, LONG, 1)
            missing = probe.report["logical_tokens"] - 1 - probe.cached
            where = "nothing" if probe.cached == 0 else "chunks" if missing > 64 else "all"
            found[where].append(wait)
            if all(found.values()):
                return
            longest = min(found["all"], default=2 * wait + 0.1)
            wait = (max(found["nothing"], default=0.0) + longest) / 2

    with nothing_lost(storm):
        talks = play_through(storm, "abort", abort)
    print(found)
    assert all(found.values())
    assert [talk.proofs() for talk in talks] == expected


@pytest.mark.parametrize(
    ("path", "body"), [("/abort_request", {"abort_all": True}), ("/pause_generation", {"mode": "abort"})]
)
def test_fault_everything_is_aborted(storm: Server, expected: Any, path: str, body: dict[str, Any]) -> None:
    """Between two turns of the agents, whose own requests would be aborted too."""
    talks = agents(path)
    play(storm, talks, 1)
    with nothing_lost(storm), ThreadPoolExecutor(4) as threads:
        long = [victim(f"all {n}", path).body(LONG, 2000) for n in range(4)]
        going = [threads.submit(post, storm, "/v1/chat/completions", one) for one in long]
        wait_until(lambda: busy(storm) == 4)
        assert post(storm, path, body)[0] == 200
        for one in going:
            assert was_aborted(one.result())
        assert post(storm, "/continue_generation", {})[0] == 200
        check_sound(storm)
        play(storm, talks, TURNS - 1)
    check_sound(storm)
    assert [talk.proofs() for talk in talks] == expected


@pytest.mark.parametrize("mode", ["in_place", "retract"])
def test_fault_pause_and_resume(storm: Server, expected: Any, mode: str) -> None:
    """Paused again and again, in every phase of a request with seven chunks and thirty tokens."""
    alone = victim("paused", f"{mode} alone").ask(storm, LONG, 30)
    with ThreadPoolExecutor(1) as thread:
        going: list[Any] = []

        def pause() -> None:
            going.append(thread.submit(victim("paused", mode).ask, storm, LONG, 30))
            for _ in range(6):
                time.sleep(0.15)
                assert post(storm, "/pause_generation", {"mode": mode})[0] == 200
                time.sleep(0.1)
                assert post(storm, "/continue_generation", {})[0] == 200

        with nothing_lost(storm):
            talks = play_through(storm, mode, pause)
        assert going[0].result().proof() == alone.proof()
    assert [talk.proofs() for talk in talks] == expected


def test_fault_flush_between_turns(storm: Server, expected: Any) -> None:
    """Who was flushed goes on like somebody who comes with that conversation for the first time."""
    talks = agents("flush")
    play(storm, talks, 1)
    check_sound(storm)
    newcomers = [talk.again(talk.session, "newcomers") for talk in talks]
    play(storm, newcomers, TURNS - 1)
    check_sound(storm)
    assert post(storm, "/flush_cache", {})[0] == 200
    play(storm, talks, TURNS - 1)
    check_sound(storm)
    assert [talk.proofs()[1:] for talk in talks] == [talk.proofs() for talk in newcomers]
    assert [talk.proofs() for talk in talks[4:]] == expected[4:]


def test_fault_flush_while_busy(storm: Server, expected: Any) -> None:
    """Refused, and nothing happens."""

    def flush() -> None:
        def wait() -> None:
            wait_until(lambda: busy(storm) > 0)
            for _ in range(5):
                assert post(storm, "/flush_cache", {})[0] == 400

        assert was_aborted(abort_after(storm, victim("busy"), "busy", wait))

    with nothing_lost(storm):
        talks = play_through(storm, "busy", flush)
    assert [talk.proofs() for talk in talks] == expected


def test_fault_flush_of_retracted_sessions(storm: Server, expected: Any) -> None:
    """A pause that retracts everybody lets a flush through: who had holes computes its past again and decides anew."""

    def flush() -> None:
        wait_until(lambda: busy(storm) > 0)
        assert post(storm, "/pause_generation", {"mode": "retract"})[0] == 200
        status, said = post(storm, "/flush_cache", {})
        assert status == 200, said
        assert post(storm, "/continue_generation", {})[0] == 200

    talks = play_through(storm, "retracted", flush)
    assert [talk.proofs() for talk in talks[4:]] == expected[4:]
    assert [talk.proofs()[0] for talk in talks] == [proofs[0] for proofs in expected]
