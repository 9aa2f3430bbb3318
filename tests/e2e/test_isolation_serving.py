"""Isolation on a real server: two hundred sessions in one pool, and tenants who say what others have said.

A session's answers depend on everything it reads. So they are compared with those of a run in which every session has a salt of
its own, where there is nothing that another could have left: no text, no record, no memory, no hole.
"""

from __future__ import annotations

import random
from concurrent.futures import ThreadPoolExecutor

import pytest

from intentkv.engine.doctor_server import examine_server
from intentkv.evals.server import Server
from tests.e2e.agents import UNPRUNED, Talk, check_sound, nothing_lost, post, words

SESSIONS, TOGETHER = 200, 16
SCORERS = ("intent", "intent-rule", "keydiff", "streaming", "snapkv")
BUDGETS = (16, 48, UNPRUNED, 32)
SALTS = ("", "salt", "other salt")


def tenant(number: int, salt: str) -> Talk:
    """Three tenants use the same session ids; half of the ids have the same text under every salt, too."""
    return Talk(f"agent {number // len(SALTS)}", salt, BUDGETS[number % len(BUDGETS)], SCORERS[number % len(SCORERS)])


def texts(number: int) -> tuple[str, str]:
    """A document that many have, and a secret; then a question. Nobody is pruned within what he shares with others."""
    client = number // len(SALTS)
    owner = f"client {client}" if client % 2 else f"session {number}"
    return f"{words(f'document {client % 4}', 30)}. The code is {words(owner, 40)}.", words(
        f"question {client % 5}", 50
    )


def play_all(server: Server, numbers: list[int], own_salts: bool) -> dict[int, Talk]:
    """Both turns of every session, TOGETHER at once."""

    def play_one(number: int) -> Talk:
        talk = tenant(number, f"own {number}" if own_salts else SALTS[number % len(SALTS)])
        for text in texts(number):
            talk.say(server, text, 6)
        return talk

    with nothing_lost(server), ThreadPoolExecutor(TOGETHER) as threads:
        talks = dict(zip(numbers, threads.map(play_one, numbers), strict=True))
    check_sound(server)
    return talks


def test_isolation_of_two_hundred_sessions_on_a_server(calm: Server) -> None:
    """Mixed scorers and budgets, equal system prompts and documents, the same ids under three salts."""
    order = random.Random(0).sample(range(SESSIONS), SESSIONS)
    alone = play_all(calm, order, own_salts=True)
    assert post(calm, "/flush_cache", {})[0] == 200
    together = play_all(calm, order[::-1], own_salts=False)
    assert examine_server(calm.url)[0][0]["sessions"] == SESSIONS
    for number in order:
        assert together[number].proofs() == alone[number].proofs(), f"session {number}"
    pruned = [talk for talk in together.values() if talk.answers[1].report["dropped_tokens"]]
    assert {(talk.scorer, talk.budget) for talk in pruned} == {
        (s, b) for s in SCORERS for b in BUDGETS if b != UNPRUNED
    }
    assert all(talk.answers[1].report["dropped_tokens"] == 0 for talk in together.values() if talk.budget == UNPRUNED)
    assert sum(talk.answers[0].cached for talk in alone.values()) == 0, "a salt of one's own finds nothing"
    assert sum(talk.answers[0].cached > 0 for talk in together.values()) > SESSIONS // 2, "little was shared"
    # Sessions with the same text under another salt, another budget or scorer: nobody's answer is made of another's holes.
    assert len({talk.proofs()[0] for talk in together.values()}) > SESSIONS // 2


@pytest.mark.parametrize("number", range(4))
def test_isolation_of_a_text_that_another_tenant_replays(calm: Server, number: int) -> None:
    """He gets the answer of stock SGLang, or that of any newcomer with his budget; with a salt of his own he does not
    even find the text. The session itself goes on with its holes."""
    owner = Talk(f"owner {number}", "house")
    owner.say(calm, words(f"owned {number}", 120))
    owner.say(calm, words(f"owned {number} too", 60))
    assert owner.answers[-1].report["dropped_tokens"] > 0
    question = "What was the code?"
    stock = owner.again("stock", f"stock {number}").ask(calm, question, custom_params={"intentkv_enabled": False})
    assert stock.report == {} and stock.cached == 0
    newcomer = owner.again("newcomer", f"newcomer {number}").ask(calm, question)
    assert newcomer.report["dropped_tokens"] > 0 and newcomer.text != stock.text
    assert owner.again(owner.session, f"lane {number}").ask(calm, question).proof() == newcomer.proof()
    thieves = (
        owner.again(f"thief {number}", "house"),
        owner.again(f"thief {number}", f"street {number}"),
        owner.again(owner.session, f"road {number}"),
    )
    for thief in thieves:
        thief.budget = UNPRUNED
        answer = thief.ask(calm, question)
        assert answer.report["dropped_tokens"] == 0
        assert answer.text == stock.text, "the answer depends on what another session has pruned"
        # Under the same salt the text is found as far as it has no holes, under another not at all.
        assert 0 < answer.cached < 128 if thief.salt == "house" else answer.cached == 0
    own = owner.say(calm, question)
    assert own.report["dropped_tokens"] >= owner.answers[-2].report["dropped_tokens"] > 0 and owner.found_all[-1]
    check_sound(calm)
