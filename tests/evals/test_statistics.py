"""Figures against hand-computed ones, intervals against a bootstrap written out."""

from typing import Any

import numpy as np
import pytest

from intentkv.evals.agents_report import comparisons, summaries
from intentkv.evals.statistics import RESAMPLES, Turns, accuracy, interval, summary


def turn(right: bool, *, age: int = 1, completed: bool = True, **more: Any) -> dict[str, Any]:
    """A sample as the runner notes it; one that was not completed has no figures."""
    about = {"age": age, "asked_before": False, "as_argument": False, "branch": 0, "right": right}
    if not completed:
        return {**about, "completed": False, **more}
    cost = {"prompt_tokens": 100, "cached_tokens": 60, "logical_tokens": 110, "live_tokens": 50, "rows_read": 500}
    return {**about, "completed": True, **cost, "score_ms": 2.0, "seconds": 0.5, **more}


def plays(pattern: dict[str, str]) -> dict[str, Turns]:
    """`{"a": "101"}`: session a had a right, a wrong and a right answer."""
    return {name: [turn(mark == "1") for mark in marks] for name, marks in pattern.items()}


def written_out(own: dict[str, str], base: dict[str, str], measure: str, seed: int) -> tuple[float, float]:
    """The percentile bootstrap over sessions as nested loops; both sides answer with the sessions of the same draw."""
    names, values = sorted(own), []
    for sample in np.random.default_rng(seed).integers(len(names), size=(RESAMPLES, len(names))).tolist():
        sides = []
        for side in (own, base):
            marks = "".join(side[names[i]] for i in sample)
            sides.append(marks.count("1") / len(marks))
        if measure == "difference":
            values.append(sides[0] - sides[1])
        elif measure == "accuracy":
            values.append(sides[0])
        elif sides[1] > 0:
            values.append(sides[0] / sides[1])
    low, high = np.percentile(values, [2.5, 97.5])
    return float(low), float(high)


OWN = {"a": "1101", "b": "0011", "c": "111", "d": "00000", "e": "10"}
BASE = {"a": "1111", "b": "0111", "c": "110", "d": "01000", "e": "11"}


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_the_interval_is_that_of_a_bootstrap_written_out(seed: int) -> None:
    assert interval(plays(OWN), seed=seed) == pytest.approx(written_out(OWN, BASE, "accuracy", seed), abs=1e-4)
    for measure in ("ratio", "difference"):
        found = interval(plays(OWN), plays(BASE), measure, seed)
        assert found == pytest.approx(written_out(OWN, BASE, measure, seed), abs=1e-4)


def test_pairing_leaves_nothing_uncertain_where_one_side_is_the_other() -> None:
    assert interval(plays(OWN), plays(OWN), "difference") == (0.0, 0.0)
    assert interval(plays(BASE), plays(BASE)) == (1.0, 1.0)


def test_what_has_no_interval() -> None:
    assert interval(plays({"a": "10"})) is None
    assert interval(plays({"a": "1", "b": "1"}), plays({"a": "0", "b": "0"})) is None
    with pytest.raises(KeyError):
        interval(plays({"a": "1", "b": "1"}), plays({"a": "1"}))
    assert accuracy([]) is None


def test_the_summary_by_hand() -> None:
    own = {
        "a": [
            turn(True, age=0, live_tokens=40),
            turn(False, age=2, prompt_tokens=200, cached_tokens=190, live_tokens=80, logical_tokens=210),
        ],
        "b": [
            turn(True, age=1, asked_before=True),
            turn(True, age=7, as_argument=True, branch=1),
            turn(False, age=4, completed=False),
        ],
    }
    full = plays({"a": "11", "b": "110"})
    found = summary(own, full)
    assert found["accuracy"] == 3 / 5 and found["of_full"] == pytest.approx((3 / 5) / (4 / 5))
    assert found["completion"] == 4 / 5
    assert {age: (part["accuracy"], part["turns"]) for age, part in found["by_age"].items()} == {
        "0": (1.0, 1), "1-2": (0.5, 2), "3-5": (0.0, 1), "6+": (1.0, 1),
    }  # fmt: skip
    assert found["first_asked"] == {"accuracy": 0.5, "turns": 4} and found["re_asked"] == {"accuracy": 1.0, "turns": 1}
    assert found["as_argument"] == {"accuracy": 1.0, "turns": 1} and found["sub_agents"] == {
        "accuracy": 1.0,
        "turns": 1,
    }
    assert found["prefix_hit"] == (190 + 60) / (200 + 100)  # later turns that were completed
    assert (found["live_mean"], found["live_peak"]) == ((40 + 80 + 50 + 50) / 4, 80)
    assert (found["logical_mean"], found["logical_peak"]) == ((110 + 210 + 110 + 110) / 4, 210)
    assert (found["rows_read"], found["score_ms"], found["seconds"]) == (2000, 8.0, 2.0)
    assert (found["sessions"], found["turns"]) == (2, 5)


def test_summaries_and_comparisons_name_what_they_compare() -> None:
    sides = {"full": BASE, "intent@25%": OWN, "snapkv@25%": {**OWN, "a": "0000"}, "snapkv@12%": OWN}
    flat = [
        {"configuration": name, "session": session, "turns": turns}
        for name, pattern in sides.items()
        for session, turns in plays(pattern).items()
    ]
    found = summaries(flat)
    assert list(found) == ["full", "full@100%", "intent@25%", "snapkv@25%", "snapkv@12%"]
    assert found["full"] == 12 / 18 and found["intent@25%"]["of_full"] == pytest.approx(9 / 12)
    compared = comparisons(flat)
    assert list(compared) == ["intent@25% - snapkv@25%"]  # nothing of the first scorer's was played at 12 %
    assert compared["intent@25% - snapkv@25%"]["difference"] == pytest.approx(3 / 18)
