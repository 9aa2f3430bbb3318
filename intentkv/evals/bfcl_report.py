"""What an evaluation on BFCL says: its result file, its summary, and a table for people."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

from rich.table import Table

from intentkv.evals.agents_report import comparisons, grouped
from intentkv.evals.configurations import FULL
from intentkv.evals.journal import Play
from intentkv.evals.provenance import package_version, provenance
from intentkv.evals.statistics import Plays, interval, prefix_hit


def bfcl_result(plan: dict[str, Any], plays: Sequence[Play]) -> dict[str, Any]:
    """The content of a result file: where it comes from, the plan, the summary, comparisons and every sample."""
    return {
        "kind": "bfcl",
        **provenance(),
        "bfcl_eval": package_version("bfcl-eval"),
        "plan": plan,
        "summary": bfcl_summaries(plays),
        "comparisons": comparisons(_verdicts(plays)),
        "plays": list(plays),
    }


def bfcl_summaries(plays: Sequence[Play]) -> dict[str, Any]:
    """Configuration -> its figures, in the order in which they were first played."""
    turns = grouped(plays)
    verdicts = grouped(_verdicts(plays))
    found = {}
    for name, own in verdicts.items():
        of_it = [play for play in plays if play["configuration"] == name]
        full = verdicts.get(FULL) if name != FULL else None
        found[name] = {**_accuracy(of_it, own, full), **_cost(turns[name])}
    return found


def _verdicts(plays: Sequence[Play]) -> list[Play]:
    """Each case as a session of one turn, for the statistics over sessions: bfcl judges cases, not turns."""
    return [{**play, "turns": [{"right": play["right"]}]} for play in plays]


def _accuracy(plays: Sequence[Play], verdicts: Plays, full: Plays | None) -> dict[str, Any]:
    """Accuracy of cases; one that was not completed is wrong. `ci`: of `of_full`, or of `accuracy` where `full` is None."""
    right = sum(play["right"] for play in plays) / len(plays)
    base = sum(turns[0]["right"] for name, turns in full.items() if name in verdicts) / len(verdicts) if full else 0
    categories: dict[str, list[bool]] = {}
    for play in plays:
        categories.setdefault(play["session"].rpartition("_")[0], []).append(play["right"])
    own = interval(verdicts)
    return {
        "accuracy": right,
        "accuracy_ci": own,
        "of_full": right / base if base else None,
        "ci": interval(verdicts, full) if full else own,
        "completion": sum(all(turn["completed"] for turn in play["turns"]) for play in plays) / len(plays),
        "by_category": {name: {"accuracy": sum(of) / len(of), "cases": len(of)} for name, of in categories.items()},
        "wrong": dict(Counter(play["wrong"] for play in plays if not play["right"]).most_common()),
        "cases": len(plays),
    }


def _cost(plays: Plays) -> dict[str, Any]:
    """Tokens at the ends of turns, and the work of all requests, over completed turns; see `statistics.summary`."""
    done = [turn for turns in plays.values() for turn in turns if turn["completed"]]
    mean = {
        f"{kind}_mean": round(sum(turn[f"{kind}_tokens"] for turn in done) / len(done), 1) if done else None
        for kind in ("live", "logical")
    }
    peak = {
        f"{kind}_peak": max((turn[f"{kind}_tokens"] for turn in done), default=None) for kind in ("live", "logical")
    }
    return {
        **mean,
        **peak,
        "prefix_hit": prefix_hit(plays),
        "prefilled_tokens": sum(turn["prompt_tokens"] - turn["cached_tokens"] for turn in done),
        "rows_read": sum(turn["rows_read"] for turn in done),
        "requests": sum(turn["requests"] for turn in done),
        "calls": sum(len(step) for turn in done for step in turn["calls"]),
        "score_ms": round(sum(turn["score_ms"] for turn in done), 1),
        "seconds": round(sum(turn["seconds"] for turn in done), 1),
        "turns": sum(len(turns) for turns in plays.values()),
    }


def bfcl_table(figures: dict[str, Any]) -> Table:
    """A row a configuration."""
    table = Table(title="BFCL multi-turn", caption="95 % interval of the share of full; tokens at ends of turns")
    categories = list(next(iter(figures.values()))["by_category"]) if figures else []
    table.add_column("configuration", no_wrap=True)
    shown = [name.removeprefix("multi_turn_") for name in categories]
    for column in ("right", *shown, "of full", "interval", "done", "hit", "live", "peak", "logical", "calls", "s"):
        table.add_column(column, justify="right", no_wrap=True)
    for name, f in figures.items():
        table.add_row(
            name,
            _percent(f["accuracy"]),
            *(_percent(f["by_category"][category]["accuracy"]) for category in categories),
            _percent(f["of_full"]),
            f"{f['ci'][0]:.0%}-{f['ci'][1]:.0%}" if f["ci"] else "-",
            *(_percent(f[key]) for key in ("completion", "prefix_hit")),
            *(_count(f[key]) for key in ("live_mean", "live_peak", "logical_mean", "calls", "seconds")),
        )
    return table


def _percent(value: float | None) -> str:
    return "-" if value is None else f"{value:.0%}"


def _count(value: float | None) -> str:
    return "-" if value is None else f"{value:,.0f}"
