"""With several replicas, the front process sends a session to one of them."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from intentkv.config import Settings
from intentkv.engine import activation
from intentkv.engine.replicas import Replicas
from intentkv.engine.requests import validate_request
from tests.host.models import small_tokenizer


def test_dp_sessions_are_dealt_in_turn_and_stay() -> None:
    replicas = Replicas(3, max_sessions=4)
    assert [replicas.of(name) for name in "abcdbad"] == [0, 1, 2, 0, 1, 0, 0]


def test_dp_the_session_seen_least_recently_is_forgotten() -> None:
    replicas = Replicas(2, max_sessions=1)
    assert [replicas.of(name) for name in "abab"] == [0, 1, 0, 1]
    assert replicas.of("a") == 0 and replicas.of("c") == 0, "in place of b"
    assert replicas.of("a") == 0 and replicas.of("b") == 1, "dealt anew"


class Front:
    """As much of a TokenizerManager as the hook looks at."""

    def __init__(self, dp_size: int) -> None:
        self.server_args = SimpleNamespace(dp_size=dp_size, chat_template=None)
        self.tokenizer = small_tokenizer()

    def send(self, session: str | None, rank: int | None = None, **custom: Any) -> int | None:
        """The replica that a request is sent to; None where SGLang's balance decides."""
        request = SimpleNamespace(
            sampling_params={"custom_params": custom}, session_id=session, routed_dp_rank=rank, extra_key=None,
            cache_salt=None, rid="r",
        )  # fmt: skip
        validate_request(self, request, [1, 2, 3, 4, 5])
        return request.routed_dp_rank


@pytest.fixture
def front(monkeypatch: pytest.MonkeyPatch) -> Front:
    monkeypatch.setattr(activation, "_active", Settings())
    return Front(2)


def test_dp_requests_follow_their_session(front: Front) -> None:
    assert [front.send(name) for name in ("a", "b", "c", "b", "a", "c")] == [0, 1, 0, 1, 0, 0]
    assert front.send(None, intentkv_session="b") == 1, "the name may be told either way"
    assert front.send(None, intentkv_span="0:3") == front.send(None, intentkv_span="0:3")


def test_dp_who_has_no_session_goes_where_sglang_sends_it(front: Front) -> None:
    assert front.send(None) is None, "a prompt without messages is a session of its own"
    assert front.send("a", intentkv_enabled=False) is None
    assert front.send("a", rank=1) == 1, "the client has chosen"
    assert Front(1).send("a") is None
