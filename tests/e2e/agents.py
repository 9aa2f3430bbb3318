"""Sessions that play on while something goes wrong beside them, and what must hold of the server afterwards.

The model is tiny, random and computed in float32: what it says depends on everything it has read, and on nothing else. So
answers that are equal to those of a run without the fault were computed from the same KV.
"""

from __future__ import annotations

import contextlib
import json
import random
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

from intentkv.engine.doctor_server import examine_server
from intentkv.evals.load import read_metrics
from intentkv.evals.server import Server

BUDGET, UNPRUNED = 64, 1 << 20  # tokens of history
AGENTS, TURNS, ANSWER = 6, 3, 16
POOL = 4096
FLAGS = (
    *("--dtype", "float32", "--enable-metrics", "--chunked-prefill-size", "128"),
    *("--max-total-tokens", str(POOL), "--max-running-requests", "16", "--schedule-conservativeness", "0.1"),
    *("--enable-intentkv", "--intentkv-budget", str(BUDGET), "--intentkv-trigger", "32", "--intentkv-recent", "16"),
)
STRICT = {"SGLANG_ENABLE_STRICT_MEM_CHECK_DURING_BUSY": "1"}
STORM = {**STRICT, "SGLANG_TEST_RETRACT": "1"}
PATIENCE = 20.0  # seconds that a server lets a request wait, and lets it run
IMPATIENT = {**STRICT, "SGLANG_REQ_RUNNING_TIMEOUT": str(PATIENCE), "SGLANG_REQ_WAITING_TIMEOUT": str(PATIENCE)}
LONG = "Tell all of it."
SYSTEM = "You keep the log of the harbour. Answer in few words and never guess what the log does not say."
NAMES = ("crane", "barge", "rope", "tide", "anchor", "buoy", "pilot", "cargo", "lock", "berth", "signal", "chain")


def words(name: str, count: int) -> str:
    """`count` words, the same for the same `name`."""
    draw = random.Random(name)
    return " ".join(draw.choice(NAMES) for _ in range(count))


def post(server: Server, path: str, body: dict[str, Any], timeout: float = 120) -> tuple[int, Any]:
    """Status and answer, which is JSON or else text."""
    request = urllib.request.Request(server.url + path, json.dumps(body).encode(), {"Content-Type": "application/json"})
    try:
        with urllib.request.urlopen(request, timeout=timeout) as answer:
            status, said = answer.status, answer.read().decode()
    except urllib.error.HTTPError as error:
        status, said = error.code, error.read().decode()
    return status, json.loads(said) if said[:1] in ("{", "[") else said


@dataclass(frozen=True)
class Answer:
    """`cached`: tokens of the prompt that were found; `finish`: "length", "stop" or "abort"."""

    text: str
    finish: str
    cached: int
    report: dict[str, Any]

    def proof(self) -> tuple[Any, ...]:
        """What must be equal where the same was computed."""
        return self.text, *(self.report[key] for key in ("logical_tokens", "live_tokens", "dropped_tokens", "events"))


@dataclass
class Talk:
    """One conversation. `salt`: its tenant's `cache_salt`; `found_all`: by turn, whether nothing of it had been lost."""

    session: str
    salt: str
    budget: int = BUDGET
    scorer: str = "intent"
    messages: list[dict[str, str]] = field(default_factory=lambda: [{"role": "system", "content": SYSTEM}])
    answers: list[Answer] = field(default_factory=list)
    found_all: list[bool] = field(default_factory=list)

    def body(self, text: str, tokens: int, **fields: Any) -> dict[str, Any]:
        params = {"intentkv_budget": self.budget, "intentkv_scorer": self.scorer, **fields.pop("custom_params", {})}
        who = {"session_id": self.session, "cache_salt": self.salt, "custom_params": params}
        how = {"temperature": 0, "max_tokens": tokens, "ignore_eos": True, "return_meta_info": True}
        return {"model": "m", "messages": [*self.messages, {"role": "user", "content": text}], **who, **how, **fields}

    def ask(self, server: Server, text: str, tokens: int = ANSWER, **fields: Any) -> Answer:
        """The answer to `text`, which the conversation does not remember."""
        status, said = post(server, "/v1/chat/completions", self.body(text, tokens, **fields))
        assert status == 200, said
        choice = said["choices"][0]
        meta = choice["meta_info"]
        finish = meta["finish_reason"]["type"]
        return Answer(choice["message"]["content"] or "", finish, meta["cached_tokens"], meta.get("intentkv", {}))

    def say(self, server: Server, text: str, tokens: int = ANSWER) -> Answer:
        """Like `ask`, and the conversation goes on from there."""
        answer = self.ask(server, text, tokens)
        # All but the last answer: a random model's words may come back as other tokens.
        left = self.answers[-1].report["logical_tokens"] - tokens - 4 if self.answers else 0
        self.found_all.append(answer.cached >= left)
        self.answers.append(answer)
        self.messages += [{"role": "user", "content": text}, {"role": "assistant", "content": answer.text}]
        return answer

    def again(self, session: str, salt: str) -> Talk:
        """The same conversation as it stands, for a session that nobody has heard of."""
        return Talk(session, salt, self.budget, self.scorer, list(self.messages))

    def proofs(self) -> list[tuple[Any, ...]]:
        return [answer.proof() for answer in self.answers]


def agents(salt: str) -> list[Talk]:
    """Four that are pruned and two that are not; ids, texts and answers are the same under every salt."""
    return [Talk(f"agent-{number}", salt, BUDGET if number < 4 else UNPRUNED) for number in range(AGENTS)]


def turn(server: Server, talk: Talk) -> None:
    """The next turn of one of `agents`; two and two begin with the same words."""
    number, done = int(talk.session.removeprefix("agent-")), len(talk.messages) // 2
    begin = words(f"both {number // 2}", 20) if done == 0 else ""
    talk.say(server, f"{begin} Entry {done} of watch {number}: {words(f'{number} {done}', 60)}. What is next?")


def play(server: Server, talks: list[Talk], turns: int) -> None:
    """So many turns of each, all conversations at once."""

    def play_one(talk: Talk) -> None:
        for _ in range(turns):
            turn(server, talk)

    with ThreadPoolExecutor(len(talks)) as threads:
        list(threads.map(play_one, talks))


def play_through(server: Server, salt: str, fault: Callable[[], None]) -> list[Talk]:
    """All agents to the end; `fault` happens beside their second and third turns, and the server must be sound after."""
    talks = agents(salt)
    play(server, talks, 1)
    with ThreadPoolExecutor(1) as thread:
        playing = thread.submit(play, server, talks, TURNS - 1)
        fault()
        playing.result()
    check_sound(server)
    return talks


def busy(server: Server) -> int:
    """Requests that run or wait."""
    with urllib.request.urlopen(server.url + "/v1/loads", timeout=60) as answer:
        return sum(load["num_running_reqs"] + load["num_waiting_reqs"] for load in json.load(answer)["loads"])


def wait_until(what: Callable[[], bool], seconds: float = 120) -> None:
    end = time.monotonic() + seconds
    while not what():
        assert time.monotonic() < end, "it did not happen in time"
        time.sleep(0.05)


def check_sound(server: Server) -> None:
    """Nothing runs any more, every slot has one owner, and SGLang's own check of its idle pool has not ended the server."""
    wait_until(lambda: busy(server) == 0)
    for _ in range(2):  # the scheduler answers before it looks at its idle pool, so the second answer proves the look
        schedulers, reasons = examine_server(server.url)
        assert reasons == []
        assert [said["running"] for said in schedulers] == [0]
        time.sleep(0.2)
    log = server.log.read_text(errors="replace")
    for trouble in ("leak", "ledger is wrong", "Scheduler hit an exception"):
        assert trouble not in log


def victim(name: str, salt: str = "victims", budget: int = BUDGET) -> Talk:
    """A session with a long past that no server has computed yet: seven chunks of 128, each with an event."""
    talk = Talk(name, salt, budget)
    talk.messages += [{"role": "user", "content": words(name, 500)}, {"role": "assistant", "content": "Noted."}]
    return talk


def lost(server: Server) -> float:
    """How often a session, or a retracted request, has come back and found that something it had kept was evicted."""
    return read_metrics(server.url)["intentkv_namespaces_evicted_total"]


@contextlib.contextmanager
def nothing_lost(server: Server) -> Iterator[None]:
    """The pool is large enough for what happens here: no session must decide anew."""
    before = lost(server)
    yield
    assert lost(server) == before


def was_aborted(said: tuple[int, Any]) -> bool:
    """Whether a request was answered as aborted: by an error, or with what it had by then."""
    status, answer = said
    return status in (400, 499, 500, 503) or answer["choices"][0]["meta_info"]["finish_reason"]["type"] == "abort"


def abort_after(server: Server, talk: Talk, rid: str, wait: Callable[[], None], **fields: Any) -> tuple[int, Any]:
    """Status and answer of a long request that is aborted when `wait` returns."""
    with ThreadPoolExecutor(1) as thread:
        going = thread.submit(post, server, "/v1/chat/completions", talk.body(LONG, 2000, rid=rid, **fields))
        wait()
        while not going.done():  # SGLang ignores an abort that comes before it has taken the request in
            assert post(server, "/abort_request", {"rid": rid})[0] == 200
            time.sleep(0.02)
        return going.result()
