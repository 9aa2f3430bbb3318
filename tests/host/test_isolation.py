"""Two hundred sessions with common texts in one pool: what one has pruned, remembered or asked reaches no other."""

from __future__ import annotations

import random
from dataclasses import dataclass, field

import numpy as np
import pytest
from sglang.srt.managers.schedule_batch import Req

from intentkv.config import Budget
from intentkv.engine.state import RequestState
from intentkv.observe.session import SessionKey, session_key
from intentkv.observe.spans import Spans
from tests.host.checks import check_record, check_world
from tests.host.pools import publish_settings
from tests.host.session_world import VOCABULARY, SessionWorld

publish_settings()

SESSIONS = 200
TOGETHER = 12  # sessions that run at once
SCORERS = ("intent-rescaled", "intent-rule", "keydiff", "streaming", "random", "random-sentence")
SALTS = (None, "salt", "other salt")
NOBODYS_SALT = "a salt that no session has"
SYSTEM, DOCUMENT, SECRET, QUESTION, ANSWER = 4, 40, 24, 8, 3  # tokens
NEVER_PRUNED = 1 << 20


def words(name: str, count: int) -> list[int]:
    draw = random.Random(name)
    return [draw.randrange(VOCABULARY) for _ in range(count)]


@dataclass
class Tenant:
    """One session of one client. `text` is what was said so far, `holes` what its newest request has dropped."""

    number: int
    session_id: str | None
    salt: str | None
    scorer: str
    budget: int
    text: list[int]
    answers: list[list[int]] = field(default_factory=list)
    holes: np.ndarray | None = None

    def key(self, prompt: list[int], rid: str) -> SessionKey:
        return session_key(
            session_id=self.session_id,
            span_tokens=None,
            prompt_ids=prompt,
            first_user_end=SYSTEM + DOCUMENT + SECRET,
            extra_key=None,
            cache_salt=self.salt,
            rid=rid,
        )


class Crowd(SessionWorld):
    """Knows of every slot under which salt it was computed, and which session computed it behind holes of its own."""

    def __init__(self, core: str, page_size: int, size: int) -> None:
        super().__init__(core, page_size, size, budget=0, trigger=16, chunk=32, max_requests=TOGETHER)
        self.salt_of = np.full(size + page_size, -1)
        self.private_to = np.full(size + page_size, -1)
        self.tenants: dict[str, Tenant] = {}  # by request

    def ask_for(self, tenant: Tenant, message: list[int]) -> Req:
        prompt = tenant.text + message
        req = self.request(prompt, new=ANSWER, salt=tenant.salt)
        self.tenants[req.rid] = tenant
        req.intentkv = RequestState(
            key=tenant.key(prompt, req.rid),
            label="",
            scorer=tenant.scorer,
            budget=Budget("fixed", tenant.budget),
            spans=Spans(system_end=SYSTEM, query=(len(tenant.text), len(prompt))),
            prompt=np.array(prompt),
            needs=self.runtime.scoring.needs(tenant.scorer),
        )
        return req

    def step(self, req: Req) -> None:
        if req in self.prefilling:
            self.next_chunk(req)
        elif req in self.running:
            self.decode([req])
        else:
            assert self.admit(req), f"{req.rid} was not admitted"
        if req.finished():
            tenant = self.tenants[req.rid]
            tenant.text = list(req.origin_input_ids + req.output_ids)
            tenant.answers.append(list(req.output_ids))
            tenant.holes = req.intentkv.holes

    def check_text_of(self, req: Req, fed: list[int], start: int, end: int) -> None:
        super().check_text_of(req, fed, start, end)
        tenant, slots = self.tenants[req.rid], self.row(req, end)
        holes = self.hidden_from(req, start)
        read = np.delete(slots[:start], holes[holes < start])
        salt = (*SALTS, NOBODYS_SALT).index(tenant.salt)
        assert (self.salt_of[read] == salt).all(), f"{req.rid} reads KV of another salt"
        strangers = set(self.private_to[read].tolist()) - {-1, tenant.number}
        assert not strangers, f"{req.rid} of session {tenant.number} reads what {strangers} computed behind holes"
        self.salt_of[slots[start:]] = salt
        self.private_to[slots[start:]] = tenant.number if len(holes) else -1


def all_tenants() -> list[Tenant]:
    """Three documents, one system prompt; the same session ids and the same texts under every salt."""
    tenants = []
    for number in range(SESSIONS):
        client, salt = divmod(number, len(SALTS))
        text = words("system", SYSTEM) + words(f"document {client % 3}", DOCUMENT) + words(f"secret {client}", SECRET)
        tenants.append(
            Tenant(
                number=number,
                session_id=f"agent {client}" if client % 2 else None,
                salt=SALTS[salt],
                scorer=SCORERS[number % 5 + client % 2],
                budget=(8, 16, 32)[client % 3],
                text=text,
            )
        )
    return tenants


def play(world: Crowd, tenants: list[Tenant], turn: str, draw: random.Random) -> None:
    """One turn of every tenant, TOGETHER at once, their chunks and decode steps in any order."""
    waiting = [
        world.ask_for(tenant, words(f"{turn} {tenant.number // len(SALTS)}", QUESTION))
        for tenant in draw.sample(tenants, len(tenants))
    ]
    going: list[Req] = []
    while waiting or going:
        if waiting and len(going) < TOGETHER:
            going.append(waiting.pop())
        req = draw.choice(going)
        world.step(req)
        if req.finished():
            going.remove(req)


def unpruned_answer(core: str, page_size: int, prompt: list[int]) -> list[int]:
    """What a server says that serves nobody else and drops nothing."""
    alone = Crowd(core, page_size, 512 // page_size * page_size)
    tenant = Tenant(0, None, None, "streaming", NEVER_PRUNED, prompt[:-QUESTION])
    play_one(alone, tenant, prompt[-QUESTION:])
    return tenant.answers[-1]


def play_one(world: Crowd, tenant: Tenant, message: list[int]) -> Req:
    req = world.ask_for(tenant, message)
    while not req.finished():
        world.step(req)
    return req


@pytest.mark.parametrize("size", [8192, 4096], ids=["all fit", "half fit"])
@pytest.mark.parametrize(("core", "page_size"), [("rust", 1), ("python", 16)])
def test_isolation_of_two_hundred_sessions(core: str, page_size: int, size: int) -> None:
    draw = random.Random(0)
    world, tenants = Crowd(core, page_size, size), all_tenants()
    first_texts = [list(tenant.text) for tenant in tenants]
    for turn in ("first", "second"):
        play(world, tenants, turn, draw)
        check_world(world)
    assert (world.cache.stats()["namespaces_evicted"] > 0) == (size == 4096), "slots of lost sessions must be reused"
    keys = [tenant.key(tenant.text, "").value for tenant in tenants]
    assert len(set(keys)) == SESSIONS
    pruned = [tenant for tenant in tenants if tenant.holes is not None and len(tenant.holes)]
    assert len(pruned) > SESSIONS // 2, "too few sessions were pruned: little was tested"
    assert {tenant.scorer for tenant in pruned} == set(SCORERS)
    assert (world.private_to >= 0).any()

    assert set(world.cache.records._sessions) <= set(keys)
    for key, tenant, text in zip(keys, tenants, first_texts, strict=True):
        for record in world.cache.records.of(key):
            assert record.scope == (None, tenant.salt)
            assert record.tokens[: len(text)].tolist() == text
            check_record(world, record)

    for victim in draw.sample(pruned, 12):
        replay(world, core, victim)
    check_world(world)


def replay(world: Crowd, core: str, victim: Tenant) -> None:
    """Others say all that a session said: in sessions of their own under its salt and another, and under its id with a
    salt that no session has."""
    message = words("next", QUESTION)
    expected = unpruned_answer(core, world.page_size, victim.text + message)
    number = SESSIONS + victim.number
    other_salt = SALTS[(SALTS.index(victim.salt) + 1) % len(SALTS)]
    thieves = [
        Tenant(number, f"thief of {victim.number}", victim.salt, victim.scorer, NEVER_PRUNED, victim.text),
        Tenant(number, f"thief of {victim.number}", other_salt, victim.scorer, NEVER_PRUNED, victim.text),
        Tenant(number, victim.session_id, NOBODYS_SALT, victim.scorer, NEVER_PRUNED, victim.text),
    ]
    for thief in thieves:
        req = play_one(world, thief, message)
        assert len(req.intentkv.holes) == 0
        assert thief.answers == [expected], "the answer depends on what another session has pruned"
    own = play_one(world, victim, message)
    assert len(own.intentkv.holes), "the session itself goes on with its holes"
