"""A real server under load and strange sessions: too little memory, too many at once, one session twice, ids, a restart.

See `test_faults.py` for how it is judged.
"""

from __future__ import annotations

import functools
import http.client
import os
import signal
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from intentkv.engine.doctor_server import examine_server
from intentkv.evals.server import Server
from tests.e2e.agents import (
    AGENTS,
    BUDGET,
    LONG,
    PATIENCE,
    POOL,
    TURNS,
    UNPRUNED,
    Talk,
    abort_after,
    agents,
    busy,
    check_sound,
    lost,
    play,
    play_through,
    post,
    victim,
    wait_until,
    was_aborted,
    words,
)


def check_unless_lost(talks: list[Talk], expected: Any, others_lost: float) -> None:
    """Sessions without holes answer the same, and so do the others up to the first turn that did not find all that they had
    kept. What a retracted request loses while it waits does not show in its answer: as many more may differ."""
    differ = 0
    for talk, proofs in zip(talks, expected, strict=True):
        if talk.budget == UNPRUNED:
            assert talk.proofs() == proofs, talk.session
        lost_at = (talk.found_all + [False]).index(False)
        differ += talk.proofs()[:lost_at] != proofs[:lost_at]
    assert differ <= max(0, others_lost)


def test_fault_sixty_four_sessions_in_a_pool_for_eight(storm: Server) -> None:
    def talk_of(number: int, salt: str) -> Talk:
        talk = Talk(f"crowd {number}", salt, BUDGET if number % 2 else UNPRUNED)
        talk.say(storm, words(f"{number} first", 260), 8)
        talk.say(storm, words(f"{number} second", 140), 8)
        return talk

    with ThreadPoolExecutor(4) as threads:
        few = list(threads.map(lambda n: talk_of(n, "few"), range(16)))
    check_sound(storm)
    assert sum(talk.answers[-1].report["logical_tokens"] for talk in few) > 2 * POOL * 9 // 10
    assert all(all(talk.found_all) for talk in few)
    before = lost(storm)
    with ThreadPoolExecutor(64) as threads:
        crowd = list(threads.map(lambda n: talk_of(n, "crowd"), range(64)))
    check_sound(storm)
    told = [answer.report["session"] for talk in crowd for answer in talk.answers]
    assert told == [f"crowd {number}" for number in range(64) for _ in range(2)]
    seen = sum(not all(talk.found_all) for talk in crowd)
    print(lost(storm) - before, "lost, seen in the answers of", seen)
    check_unless_lost(crowd[:16], [talk.proofs() for talk in few], lost(storm) - before - seen)


@pytest.mark.parametrize("number", [0, 4], ids=["pruned", "unpruned"])
def test_fault_two_requests_of_one_session_at_once(storm: Server, number: int) -> None:
    """Each answers as if it had been alone, or had come after the other: what one has dropped, the session has dropped."""

    def begun(salt: str) -> Talk:
        talk = agents(f"{salt} {number}")[number]
        talk.scorer = "keydiff"  # no memory of queries, which a second request would find or not
        play(storm, [talk], 2)
        return talk

    def ask(talk: Talk, text: str) -> tuple[Any, ...]:
        return talk.ask(storm, text, 8).proof()[:4]  # how many events a retraction has left to itself does not matter

    def at_once(talk: Talk, *texts: str) -> list[tuple[Any, ...]]:
        with ThreadPoolExecutor(2) as threads:
            return list(threads.map(functools.partial(ask, talk), texts))

    one, other = f"One: {words('one', 60)}", f"Other: {words('other', 60)}"
    first, second, third = begun("one first"), begun("other first"), begun("one twice")
    one_alone, other_after = ask(first, one), ask(first, other)
    other_alone, one_after = ask(second, other), ask(second, one)
    assert ask(third, one) == one_alone
    one_again = ask(third, one)
    both = begun("both")
    assert both.proofs() == first.proofs()
    said = at_once(both, one, other)
    assert said[0] in (one_alone, one_after) and said[1] in (other_alone, other_after)
    twins = at_once(begun("twins"), one, one)
    assert one_alone in twins and set(twins) <= {one_alone, one_again}
    if number == 4:
        assert one_alone == one_after == one_again and other_alone == other_after
    check_sound(storm)


GOOD_IDS = ("../../../etc/passwd", "C:\\agents\\..\\7", "%2e%2e%00", "/", ".", " ", "агент 7", "会話", "\u202eneve", "é", "e\u0301",
            "👩‍🚀" * 64, "x" * 256, "'; drop table sessions; --", "{{ session }}", "null")  # fmt: skip
BAD_IDS = ("a\0b", "\x1b[2J", "line\nbreak", "", "x" * 257, "s" * 1_000_000)


def test_fault_strange_session_ids(storm: Server, expected: Any) -> None:
    def strange() -> None:
        for bad in BAD_IDS:
            status, said = post(storm, "/v1/chat/completions", Talk(bad, "ids").body("Hello.", 4))
            assert status == 400 and "session_id" in said["message"] and len(said["message"]) < 400
        talks = [Talk(name, "ids") for name in GOOD_IDS]
        for text in (words("strange", 90), words("id", 40)):
            with ThreadPoolExecutor(4) as threads:
                list(threads.map(functools.partial(Talk.say, server=storm, text=text, tokens=8), talks))
        assert all(all(talk.found_all) for talk in talks)
        assert [talk.answers[-1].report["session"] for talk in talks] == list(GOOD_IDS)
        assert len({tuple(talk.proofs()) for talk in talks}) == 1 and talks[0].answers[-1].report["dropped_tokens"] > 0

    before = examine_server(storm.url)[0][0]["sessions"]
    talks = play_through(storm, "strange", strange)
    assert examine_server(storm.url)[0][0]["sessions"] == before + len(GOOD_IDS) + AGENTS
    assert [talk.proofs() for talk in talks] == expected


def test_fault_killed_and_started_anew(storm: Server, expected: Any, request: pytest.FixtureRequest) -> None:
    """Sessions go on under their ids, as somebody would who comes with that conversation for the first time."""
    talks = agents("restart")
    play(storm, talks, 1)
    newcomers = [talk.again(talk.session, "restart newcomers") for talk in talks]
    play(storm, newcomers, TURNS - 1)
    retractions = storm.log.read_text().count("Testing retraction.")
    print(retractions, "retractions")
    assert retractions > 100
    with ThreadPoolExecutor(AGENTS) as threads:
        going = [threads.submit(post, storm, "/v1/chat/completions", talk.body(LONG, 2000)) for talk in talks]
        wait_until(lambda: busy(storm) == AGENTS)
        os.killpg(storm.pid, signal.SIGKILL)
        for one in going:
            assert isinstance(one.exception(), OSError | http.client.HTTPException)
    anew: Server = request.getfixturevalue("calm")
    play(anew, talks, TURNS - 1)
    assert [talk.proofs()[1:] for talk in talks] == [talk.proofs() for talk in newcomers]
    others = agents("calm")
    play(anew, others, TURNS)
    check_sound(anew)
    assert "Testing retraction." not in anew.log.read_text()
    assert [talk.proofs() for talk in others] == expected


def test_fault_pool_exhaustion(calm: Server) -> None:
    """Sessions that keep everything write until the pool is full, and one asks for more than there is.

    Not where SGLang tests retractions: each makes it admit less, and the pool never gets full.
    """

    def times_full() -> int:
        return calm.log.read_text().count("KV cache pool is full")

    reference = agents("room")
    play(calm, reference, TURNS)
    full, lost_before = times_full(), lost(calm)

    def fill() -> None:
        monster = Talk("monster", "greedy", UNPRUNED)
        status, said = post(calm, "/v1/chat/completions", monster.body(words("monster", 2 * POOL), 8))
        assert status == 400 and f"the KV pool has {2 * POOL}" in said["message"]
        greedy = [victim(f"greedy {n}", "greedy", UNPRUNED) for n in range(14)]
        with ThreadPoolExecutor(len(greedy)) as threads:
            until_full = functools.partial(wait_until, lambda: times_full() > full)
            # Told to ignore the end of the text, SGLang would set the whole answer's memory aside.
            hopeful = functools.partial(abort_after, calm, ignore_eos=False)
            going = [threads.submit(hopeful, talk=one, rid=one.session, wait=until_full) for one in greedy]
            assert all(was_aborted(one.result()) for one in going)

    talks = play_through(calm, "no room", fill)
    losses = lost(calm) - lost_before
    print(times_full() - full, "times full,", losses, "lost")
    seen = sum(not all(talk.found_all) for talk in talks)
    check_unless_lost(talks, [talk.proofs() for talk in reference], losses - seen)


def test_fault_timeouts(calm: Server) -> None:
    """Requests that run too long, and two that wait too long behind them."""
    reference, talks = agents("patient"), agents("impatient")
    play(calm, reference, TURNS)
    play(calm, talks, 1)
    late = [Talk(f"late {n}", "late").body(words(f"late {n}", 60), 2000) for n in range(18)]
    with ThreadPoolExecutor(18) as threads:
        going = [threads.submit(post, calm, "/v1/chat/completions", body) for body in late]
        wait_until(lambda: busy(calm) == 18)
        assert post(calm, "/pause_generation", {"mode": "in_place"})[0] == 200
        time.sleep(PATIENCE)
        assert post(calm, "/continue_generation", {})[0] == 200
        said = [one.result() for one in going]
    assert all(was_aborted(one) for one in said)
    ran, waited = (sum(f"{what} timeout" in str(one) for one in said) for what in ("running", "waiting"))
    print(ran, "ran too long,", waited, "waited too long")
    assert ran > 0 and waited >= 2 and ran + waited == 18
    check_sound(calm)
    play(calm, talks, TURNS - 1)
    check_sound(calm)
    assert [talk.proofs() for talk in talks] == [talk.proofs() for talk in reference]
