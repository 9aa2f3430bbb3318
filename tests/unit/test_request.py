"""Per-request parameters: checked by field, all at once, and nobody else's keys touched."""

import pytest

from intentkv.config import Budget, RequestSettings, Settings, parse_request
from intentkv.errors import SettingsError
from intentkv.score.registry import SCORERS


def refusal(params: object, session_id: object) -> tuple[str, ...]:
    with pytest.raises(SettingsError) as caught:
        parse_request(params, session_id, Settings())
    return caught.value.reasons


def test_a_request_takes_the_servers_settings_where_it_says_nothing() -> None:
    defaults = Settings(scorer="streaming", budget=Budget("fixed", 99))
    expected = RequestSettings(session=None, budget=defaults.budget, scorer="streaming", enabled=True, span=None)
    for params in (None, {}, {"temperature": 1, "intentkv": 3, 5: 6}, [1, 2], "text", {"intentkv_budget": None}):
        assert parse_request(params, None, defaults) == expected


def test_a_request_overrides_what_it_names() -> None:
    params = {
        "intentkv_session": "agent é 7",
        "intentkv_budget": "50%",
        "intentkv_scorer": "random",
        "intentkv_enabled": False,
        "intentkv_span": "3:17",
        "other": "left alone",
    }
    expected = RequestSettings("agent é 7", Budget("share", 50.0), "random", False, (3, 17))
    assert parse_request(params, None, Settings()) == expected
    assert parse_request(params, "agent é 7", Settings()) == expected
    assert parse_request({}, "top-level", Settings()).session == "top-level"


def test_all_bad_request_values_are_reported_at_once() -> None:
    params = {
        "intentkv_session": "",
        "intentkv_budget": "lots",
        "intentkv_scorer": 5,
        "intentkv_enabled": "yes",
        "intentkv_span": "7:7",
        "intentkv_bugdet": 1,
    }
    reasons = refusal(params, "a\x00b")
    assert [r.split(":")[0] for r in reasons] == [*params, "session_id", "session_id and intentkv_session"]
    assert "got ''" in reasons[0]
    assert reasons[2] == f"intentkv_scorer: expected one of {', '.join(SCORERS)}, got 5"
    assert reasons[3] == "intentkv_enabled: expected true or false, got 'yes'"
    assert "0 <= start < end, got '7:7'" in reasons[4]
    assert reasons[5] == "intentkv_bugdet: unknown key; the nearest is intentkv_budget"


def test_two_different_sessions_are_refused() -> None:
    (reason,) = refusal({"intentkv_session": "a"}, "b")
    assert reason == "session_id and intentkv_session: expected one of them, or both equal, got 'b' and 'a'"


@pytest.mark.parametrize("bad", ["", "x" * 257, "a\x00", "a\nb", "\x7f", "\x85", "\ud800", 5, True, ["a"]])
def test_bad_session_ids_are_refused_shortly(bad: object) -> None:
    (reason,) = refusal(None, bad)
    assert reason.startswith("session_id: expected a string of 1 to 256 characters without control characters, got ")
    assert len(reason) < 200
    reason.encode()


@pytest.mark.parametrize("good", ["a", "x" * 256, "日本語", "tab less", "👩‍🔬"])
def test_good_session_ids_are_taken(good: str) -> None:
    assert parse_request(None, good, Settings()).session == good


@pytest.mark.parametrize(
    "bad", ["", "5", "5:", ":5", "5:4", "-1:4", "a:b", "1:2:3", "1.0:2", 5, [1, 2], "0:99999999999"]
)
def test_bad_spans_are_refused(bad: object) -> None:
    (reason,) = refusal({"intentkv_span": bad}, None)
    assert reason.startswith('intentkv_span: expected "start:end", token positions with 0 <= start < end, got ')
