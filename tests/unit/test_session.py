"""Session keys: the published order, and no two sessions under one key."""

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from intentkv.observe.session import PREFIX_TOKENS, SessionKey, session_key

IDS = list(range(1000))


def key(**changes: object) -> SessionKey:
    arguments: dict = {
        "session_id": None,
        "span_tokens": None,
        "prompt_ids": IDS,
        "first_user_end": 300,
        "extra_key": None,
        "cache_salt": None,
        "rid": "r",
    }
    return session_key(**(arguments | changes))


def test_the_published_order_of_precedence() -> None:
    assert key(session_id="s", span_tokens=[1]).kind == "explicit"
    assert key(span_tokens=[1]).kind == "span"
    assert key(span_tokens=[]).kind == "prefix"
    assert key().kind == "prefix"
    assert key(first_user_end=None).kind == "request"


def test_an_explicit_id_and_a_span_do_not_depend_on_the_prompt() -> None:
    assert key(session_id="s") == key(session_id="s", prompt_ids=[7], first_user_end=None, rid="other")
    assert key(span_tokens=[1, 2]) == key(span_tokens=(1, 2), prompt_ids=[7], rid="other")
    assert key(span_tokens=[1, 2]) != key(span_tokens=[12])


def test_the_prefix_reaches_to_the_end_of_the_first_user_message() -> None:
    system = list(range(290))  # tenants share it; it alone is longer than 256 tokens
    one, two = system + [1] * 10 + [5] * 50, system + [2] * 10 + [5] * 50
    assert key(prompt_ids=one) != key(prompt_ids=two)
    assert key(prompt_ids=one) == key(prompt_ids=one + [9] * 500)
    assert key(prompt_ids=one) == key(prompt_ids=np.array(one))


def test_the_prefix_has_at_least_256_tokens_where_there_are_as_many() -> None:
    same = list(range(PREFIX_TOKENS - 1))
    assert key(prompt_ids=[*same, 1], first_user_end=9) != key(prompt_ids=[*same, 2], first_user_end=9)
    assert key(prompt_ids=[*same, 1, 3], first_user_end=9) == key(prompt_ids=[*same, 1, 4], first_user_end=9)
    assert key(prompt_ids=same[:20] + [1], first_user_end=9) == key(prompt_ids=same[:20] + [2], first_user_end=9)


@pytest.mark.parametrize("end", [None, 1001])
def test_a_prompt_that_does_not_reach_that_end_matches_nothing(end: int | None) -> None:
    keys = [key(first_user_end=end) for _ in range(3)]  # the same rid each time
    assert {k.kind for k in keys} == {"request"}
    assert len({k.value for k in keys}) == 3


SALTS = [None, "", "a", "b", "ab", '","', "null", 'a", "b']


def test_salts_part_every_kind_of_key() -> None:
    for kind in ({"session_id": "s"}, {"span_tokens": [1]}, {}):
        values = {key(**kind, extra_key=x, cache_salt=y).value for x, y in itertools.product(SALTS, SALTS)}
        assert len(values) == len(SALTS) ** 2


def test_kinds_never_meet() -> None:
    ids = [1, 2, 3]
    values = [
        key(session_id="[1, 2, 3]").value,
        key(session_id="123").value,
        key(span_tokens=ids).value,
        key(prompt_ids=ids, first_user_end=3).value,
        key(first_user_end=None, rid="[1, 2, 3]").value,
    ]
    assert len(set(values)) == len(values)


TEXT = st.one_of(st.none(), st.text(max_size=6))


@given(st.tuples(st.text(min_size=1, max_size=6), TEXT, TEXT), st.tuples(st.text(min_size=1, max_size=6), TEXT, TEXT))
def test_keys_are_equal_only_for_equal_inputs(one: tuple, two: tuple) -> None:
    keys = [key(session_id=session, extra_key=extra, cache_salt=salt) for session, extra, salt in (one, two)]
    assert (keys[0] == keys[1]) == (one == two)
