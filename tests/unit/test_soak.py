"""The verdict of a soak run: what a flat run says, and each way in which one can drift."""

from __future__ import annotations

from dataclasses import replace

import pytest

from intentkv.evals.soak import Figures, Sample, figures, memory_growth, rate

MINUTES = 30
REST = {
    "sglang:num_running_reqs": 0.0,
    "sglang:num_queue_reqs": 0.0,
    "sglang:num_used_tokens": 0.0,
    "intentkv_dropped_tokens_total": 900.0,
    "intentkv_freed_slots_total": 800.0,
    "intentkv_sessions": 32.0,
}
# Memory grows until a quarter of the run, and then stays.
SAMPLES = [
    Sample(
        60.0 * m,
        {"a (1)": min(700 + 50 * m, 1000), "b (2)": 500},
        {"x_total": 10.0 * m, "gauge": -1.0 * m},
    )
    for m in range(MINUTES + 1)
]
TURNS = [0.5 + second for second in range(60 * MINUTES)]  # one a second


def judge(
    samples: list[Sample] = SAMPLES, turns: list[float] = TURNS, rest: dict[str, float] = REST, window: float = 300.0
) -> Figures:
    return figures(samples, turns, 60.0 * MINUTES, window, rest, max_sessions=32)


def test_soak_passes_when_all_is_flat() -> None:
    told = judge()
    assert told == Figures(memory_growth=0.0, adrift=[], first=1.0, last=1.0)
    assert told.passed


def test_soak_memory_is_that_of_the_process_that_changed_most() -> None:
    assert memory_growth(SAMPLES[0], SAMPLES[-1]) == {"a (1)": pytest.approx(3 / 7), "b (2)": 0.0}
    for end, passed in ((509, True), (511, False), (491, True), (489, False)):
        told = judge([*SAMPLES[:-1], replace(SAMPLES[-1], resident={"a (1)": 1001, "b (2)": end})])
        assert told.memory_growth == pytest.approx(end / 500 - 1)
        assert told.passed is passed


def test_soak_throughput_of_the_first_and_last_window() -> None:
    assert rate([0.0, 1.0, 2.0, 9.9, 10.0], 1.0, 10.0) == pytest.approx(3 / 9)
    slower = [t for t in TURNS if t < 1500 or int(t) % 10]
    told = judge(turns=slower)
    assert (told.first, told.last) == (1.0, pytest.approx(0.9)) and not told.passed
    assert judge(turns=[t for t in TURNS if t < 1500 or int(t) % 25]).passed, "4 % fewer"
    assert not judge(turns=[]).passed


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"sglang:num_used_tokens": 64.0}, "num_used_tokens is 64 although nobody asks"),
        ({"intentkv_freed_slots_total": 901.0}, "901 slots were freed, but only 900 tokens dropped"),
        ({"intentkv_sessions": 33.0}, "33 sessions are remembered: expected at most 32"),
        ({"intentkv_dropped_tokens_total": 0.0, "intentkv_freed_slots_total": 0.0}, "nothing was dropped"),
    ],
)
def test_soak_counters_that_do_not_add_up(change: dict[str, float], said: str) -> None:
    told = judge(rest={**REST, **change})
    (line,) = told.adrift
    assert said in line and not told.passed


def test_soak_without_metrics_is_no_pass() -> None:
    missing = {name: value for name, value in REST.items() if name != "sglang:num_queue_reqs"}
    assert judge(rest=missing).adrift == ["sglang:num_queue_reqs is missing: start the server with --enable-metrics"]


def test_soak_sees_a_counter_that_falls_and_a_process_that_goes() -> None:
    last = replace(SAMPLES[-1], resident={"a (1)": 1000, "c (3)": 1}, counters={"x_total": 5.0})
    assert judge([*SAMPLES[:-1], last]).adrift == [
        "process b (2) ended after a quarter of the run",
        "process c (3) started after a quarter of the run",
        "x_total fell from 290 to 5",
    ]


def test_soak_too_short_is_refused() -> None:
    for samples, window in ((SAMPLES[:1], 300.0), (SAMPLES, 901.0)):
        with pytest.raises(ValueError, match="let it run longer"):
            judge(samples, window=window)
