"""What an evaluation of agent sessions says: its result file, its summary, and tables for people."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rich.table import Table

from intentkv.evals.configurations import FULL
from intentkv.evals.journal import Play
from intentkv.evals.provenance import provenance
from intentkv.evals.statistics import AGES, Turns, accuracy, interval, summary


def result_file(plan: dict[str, Any], plays: Sequence[Play]) -> dict[str, Any]:
    """The content of a result file: where it comes from, the plan, the summary, comparisons and every sample."""
    return {
        "kind": "agents",
        **provenance(),
        "plan": plan,
        "summary": summaries(plays),
        "comparisons": comparisons(plays),
        "plays": list(plays),
    }


def grouped(plays: Sequence[Play]) -> dict[str, dict[str, Turns]]:
    """Configuration -> session -> turns, in the order in which they were first played."""
    groups: dict[str, dict[str, Turns]] = {}
    for play in plays:
        groups.setdefault(play["configuration"], {})[play["session"]] = play["turns"]
    return groups


def summaries(plays: Sequence[Play]) -> dict[str, Any]:
    """`full`: accuracy with the full cache; `full@100%` and each `scorer@budget`: all figures (see `summary`)."""
    groups = grouped(plays)
    full = groups.get(FULL)
    figures = {
        f"{FULL}@100%" if name == FULL else name: summary(own, None if name == FULL else full)
        for name, own in groups.items()
    }
    return figures if full is None else {FULL: figures[f"{FULL}@100%"]["accuracy"], **figures}


def comparisons(plays: Sequence[Play]) -> dict[str, Any]:
    """How much more accurate the first scorer played is than every other at the same budget and layout, with intervals.

    `"intent@25% - snapkv@25%": {"difference": 0.21, "ci": [0.12, 0.3]}`, paired by session.
    """
    groups = {name: own for name, own in grouped(plays).items() if name != FULL}
    first = next(iter(groups), "").partition("@")[0]
    found = {}
    for name, own in groups.items():
        scorer, _, budget = name.partition("@")
        best = groups.get(f"{first}@{budget}")
        if scorer != first and best is not None:
            right = [accuracy([turn for turns in side.values() for turn in turns]) or 0.0 for side in (best, own)]
            found[f"{first}@{budget} - {name}"] = {
                "difference": right[0] - right[1],
                "ci": interval(best, own, "difference"),
            }
    return found


def tables(figures: dict[str, Any]) -> list[Table]:
    """Two tables, a row a configuration: what it costs and keeps, and where it is right."""
    rows = {name: values for name, values in figures.items() if name != FULL}
    costs = Table(
        title="accuracy, memory and reuse", caption="95 % interval of the share of full; tokens at ends of turns"
    )
    head = ("right", "of full", "interval", "done", "hit", "prefilled", "live", "peak", "logical", "rows read", "s")
    parts = Table(title="right answers by age of the fact, and by how it was asked for")
    asked = {"first": "first_asked", "again": "re_asked", "call": "as_argument", "sub-agent": "sub_agents"}
    for table, columns in ((costs, head), (parts, (*AGES, *asked))):
        table.add_column("configuration", no_wrap=True)
        for column in columns:
            table.add_column(column, justify="right", no_wrap=True)
    for name, f in rows.items():
        interval = f"{f['ci'][0]:.0%}-{f['ci'][1]:.0%}" if f["ci"] else "-"
        costs.add_row(
            name,
            *(_percent(f[key]) for key in ("accuracy", "of_full")),
            interval,
            *(_percent(f[key]) for key in ("completion", "prefix_hit")),
            *(_count(f[key]) for key in ("prefilled_tokens", "live_mean", "live_peak", "logical_mean")),
            f"{f['rows_read']:.2g}",
            _count(f["seconds"]),
        )
        parts.add_row(
            name,
            *(_part(f["by_age"][age]) for age in AGES),
            *(_part(f[key]) for key in asked.values()),
        )
    return [costs, parts]


def _percent(value: float | None) -> str:
    return "-" if value is None else f"{value:.0%}"


def _count(value: float | None) -> str:
    return "-" if value is None else f"{value:,.0f}"


def _part(part: dict[str, Any]) -> str:
    return f"{_percent(part['accuracy'])} of {part['turns']}"
