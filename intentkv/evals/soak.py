"""The arithmetic of a soak run: whether memory, counters and throughput of a server stay what they were."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

TOLERANCE_MEMORY = 0.02  # of a process's resident memory at a quarter of the run
TOLERANCE_THROUGHPUT = 0.05  # of the first window's turns per second
AT_REST = ("sglang:num_running_reqs", "sglang:num_queue_reqs", "sglang:num_used_tokens")  # 0 when nobody asks


@dataclass(frozen=True)
class Sample:
    """One look at a server.

    Attributes:
        seconds: since the start of the load.
        resident: bytes by process, "name (pid)".
        counters: the server's Prometheus values by name.
    """

    seconds: float
    resident: dict[str, int]
    counters: dict[str, float]


@dataclass(frozen=True)
class Figures:
    """The four figures of a soak run, and whether it passed.

    Attributes:
        memory_growth: of the process that changed most from a quarter of the run to its end, as a share.
        adrift: what does not add up: counters, processes that came or went; one line each.
        first, last: turns per second of the first and of the last window.
    """

    memory_growth: float
    adrift: list[str]
    first: float
    last: float

    @property
    def passed(self) -> bool:
        flat = abs(self.memory_growth) <= TOLERANCE_MEMORY
        steady = self.first > 0 and abs(self.last / self.first - 1) <= TOLERANCE_THROUGHPUT
        return flat and steady and not self.adrift


def figures(
    samples: Sequence[Sample],
    turns: Sequence[float],
    seconds: float,
    window: float,
    at_rest: Mapping[str, float],
    max_sessions: int,
) -> Figures:
    """What `seconds` of load have shown.

    Args:
        samples: by time, taken while the load ran. turns: when each turn was finished, in seconds since the start.
        window: seconds of the first and the last window.
        at_rest: the server's counters after its last answer.
        max_sessions: most sessions that the server may remember.

    Raises:
        ValueError: fewer than two samples, or two windows that overlap.
    """
    if len(samples) < 2 or 2 * window > seconds:
        raise ValueError(
            f"expected two samples and two windows in the run, got {len(samples)} samples and "
            f"2 x {window:.0f} s of {seconds:.0f} s: let it run longer"
        )
    quarter = min(samples, key=lambda sample: abs(sample.seconds - seconds / 4))
    growth = memory_growth(quarter, samples[-1])
    return Figures(
        memory_growth=max(growth.values(), key=abs, default=0.0),
        adrift=[
            *_other_processes(quarter, samples[-1]),
            *_falling(samples),
            *_not_at_rest(at_rest, max_sessions),
        ],
        first=rate(turns, 0.0, window),
        last=rate(turns, seconds - window, seconds),
    )


def memory_growth(early: Sample, late: Sample) -> dict[str, float]:
    """Growth of each process that both samples have, as a share of the early one."""
    both = early.resident.keys() & late.resident.keys()
    return {name: late.resident[name] / early.resident[name] - 1 for name in sorted(both)}


def rate(times: Sequence[float], begin: float, end: float) -> float:
    """How many of `times` a second lie in `[begin, end)`."""
    return sum(begin <= time < end for time in times) / (end - begin)


def _other_processes(early: Sample, late: Sample) -> Iterator[str]:
    for name in sorted(early.resident.keys() ^ late.resident.keys()):
        yield f"process {name} {'ended' if name in early.resident else 'started'} after a quarter of the run"


def _falling(samples: Sequence[Sample]) -> Iterator[str]:
    """Counters only rise; one that falls has lost what it counted."""
    for early, late in pairwise(samples):
        for name in sorted(early.counters.keys() & late.counters.keys()):
            if name.endswith("_total") and late.counters[name] < early.counters[name]:
                yield f"{name} fell from {early.counters[name]:.0f} to {late.counters[name]:.0f}"


def _not_at_rest(counters: Mapping[str, float], max_sessions: int) -> Iterator[str]:
    for name in AT_REST:
        if name not in counters:
            yield f"{name} is missing: start the server with --enable-metrics"
        elif counters[name]:
            yield f"{name} is {counters[name]:.0f} although nobody asks: expected 0"
    dropped, freed = (counters.get(f"intentkv_{name}_total", 0.0) for name in ("dropped_tokens", "freed_slots"))
    if not dropped:
        yield "nothing was dropped: the run shows nothing about pruning"
    if freed > dropped:
        yield f"{freed:.0f} slots were freed, but only {dropped:.0f} tokens dropped"
    if counters.get("intentkv_sessions", 0.0) > max_sessions:
        yield f"{counters['intentkv_sessions']:.0f} sessions are remembered: expected at most {max_sessions}"
