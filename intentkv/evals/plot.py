"""The plots of results: one a file under docs/results/."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from itertools import zip_longest
from pathlib import Path
from typing import Any, Final

from intentkv.evals.configurations import AUTO, FULL


def lines(summary: dict[str, Any]) -> dict[str, list[dict[str, Any]]]:
    """What each line of the plot shows: `snapkv` (or `snapkv/mask`) -> its configurations' figures, fewest tokens first."""
    found: dict[str, list[dict[str, Any]]] = {}
    for name, figures in summary.items():
        scorer, _, rest = name.partition("@")
        if scorer != FULL and figures["live_mean"] is not None:
            layout = rest.partition("/")[2]
            found.setdefault(f"{scorer}/{layout}" if layout else scorer, []).append(figures)
    return {name: sorted(points, key=lambda point: float(point["live_mean"])) for name, points in found.items()}


def draw_agents(result: dict[str, Any], path: Path) -> None:
    """Writes accuracy against mean live tokens to `path` (.png or .svg), with the 95 % intervals of the accuracy.

    `result` is the content of a file that `scripts/eval_agents.py` wrote.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 5), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    for name, points in lines(result["summary"]).items():
        x = [point["live_mean"] for point in points]
        y = [100 * point["accuracy"] for point in points]
        (line,) = axes.plot(x, y, marker="o", markersize=4, label=name)
        bounded = [point for point in points if point["accuracy_ci"]]
        axes.vlines(
            [point["live_mean"] for point in bounded],
            [100 * point["accuracy_ci"][0] for point in bounded],
            [100 * point["accuracy_ci"][1] for point in bounded],
            colors=line.get_color(),
            alpha=0.3,
            linewidth=3,
        )
    full = result["summary"].get(f"{FULL}@100%")
    if full is not None:
        axes.plot([full["live_mean"]], [100 * full["accuracy"]], "k*", markersize=12, label="full cache")
        axes.axhline(100 * full["accuracy"], color="black", linewidth=0.7, linestyle=":")
    plan = result["plan"]
    axes.set_title(f"{plan['model']}, {plan['sessions']} agent sessions, commit {result['commit']}", fontsize=10)
    axes.set_xlabel("live tokens at the end of a turn, mean")
    axes.set_ylabel("right answers, % (not completed: wrong)")
    axes.set_ylim(0, 100)
    axes.grid(alpha=0.2)
    axes.legend(fontsize=8, ncols=2)
    # No date or version in the file: the same result gives the same bytes.
    figure.savefig(path, dpi=130, metadata={"Software": None})


def draw_ablation(result: dict[str, Any], path: Path) -> None:
    """Writes what each ranking kept, three bars a row, to `path`; `result` is that of `scripts/ablate_scores.py`."""
    kept = {
        name: {budget: _share(sessions) for budget, sessions in budgets.items()}
        for name, budgets in result["facts_kept"].items()
    }
    budgets = list(next(iter(kept.values())))
    series = {f"{budget} %": [100 * kept[name][budget] for name in kept] for budget in budgets}
    title = f"facts of the history live in full, %, {len(result['sessions'])} sessions, commit {result['commit']}"
    _draw_bars(list(kept), series, title, path)


def by_turn(plays: list[dict[str, Any]], configuration: str, key: str) -> list[list[float]]:
    """`key` of every completed turn, turn after turn, for each session that was played in `configuration`."""
    own = [play["turns"] for play in plays if play["configuration"] == configuration]
    return [[turn[key] for turn in turns if turn["completed"]] for turns in own]


def draw_actkv(result: dict[str, Any], path: Path) -> None:
    """Writes budget, confidence slope and live tokens by turn to `path`; `result` is that of `scripts/eval_actkv.py`.

    A thin line a session and a thick one for their mean; of live tokens only the means, one a configuration.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 9), layout="constrained")
    FigureCanvasAgg(figure)
    plays = result["plays"]
    budget, slope, live = figure.subplots(3, sharex=True)
    for axes, key in ((budget, "budget_tokens"), (slope, "confidence_slope")):
        sessions = by_turn(plays, f"actkv@{AUTO}", key)
        for values in sessions:
            axes.plot(range(1, 1 + len(values)), values, color="tab:blue", alpha=0.3, linewidth=1)
        mean = _mean_by_turn(sessions)
        axes.plot(range(1, 1 + len(mean)), mean, color="tab:blue", linewidth=2.5)
    slope.axhline(0, color="black", linewidth=0.7, linestyle=":")
    for name in dict.fromkeys(play["configuration"] for play in plays):
        mean = _mean_by_turn(by_turn(plays, name, "live_tokens"))
        right = result["summary"][f"{FULL}@100%" if name == FULL else name]["accuracy"]
        style = {"color": "black", "linestyle": ":"} if name == FULL else {}
        live.plot(range(1, 1 + len(mean)), mean, marker=".", label=f"{name}: {right:.0%} right", **style)
    budget.set_ylabel("budget of auto, tokens")
    slope.set_ylabel("slope of the confidence, nats a step")
    live.set_ylabel("live tokens, mean")
    live.set_xlabel("turn")
    live.legend(fontsize=8)
    plan = result["plan"]
    budget.set_title(
        f"{plan['model']}, {plan['sessions']} sessions of tool calls, commit {result['commit']}", fontsize=10
    )
    for axes in (budget, slope, live):
        axes.grid(alpha=0.2)
    figure.savefig(path, dpi=130, metadata={"Software": None})


def _mean_by_turn(sessions: list[list[float]]) -> list[float]:
    """The mean over the sessions that have this turn."""
    turns = zip_longest(*sessions)
    return [statistics.fmean(value for value in turn if value is not None) for turn in turns]


def draw_figures(result: dict[str, Any], path: Path) -> None:
    """Writes the main figures of a benchmark to `path`; `result` is one that `scripts/bench.py` kept."""
    title, pick = _FIGURES[result["kind"]]
    values = pick(result["figures"])
    _draw_bars(
        list(values), {"": [float(value) for value in values.values()]}, f"{title}, commit {result['commit']}", path
    )


def _sides(figures: dict[str, Any]) -> dict[str, float]:
    return {name: side["turns_per_s"] for name, side in figures["sides"].items()}


_FIGURES: dict[str, tuple[str, Callable[[dict[str, Any]], dict[str, float]]]] = {
    "serving_quarter": ("finished turns per second, pool of a quarter", _sides),
    "serving_ample": ("finished turns per second, ample pool", _sides),
    "decode": (
        "decode step, ms",
        lambda figures: {
            f"{kind}, {batch} requests": milliseconds
            for batch, of in figures["by_batch"].items()
            for kind, milliseconds in of["milliseconds"].items()
        },
    ),
    "overhead": (
        "time over stock with nothing pruned",
        lambda figures: {"decode step": figures["overhead"], "first token": figures["prefill_overhead"]},
    ),
    "score": (
        "scoring over prefill, %, longest prompt",
        lambda figures: {name: 100 * list(of.values())[-1] for name, of in figures["by_scorer"].items()},
    ),
    "kernels": (
        "times faster than the baseline, mean over shapes",
        lambda figures: {op: figures[f"{op}_speedup_mean"] for op in ("compact", "recover")},
    ),
}
DRAWN: Final = frozenset(_FIGURES)


def _share(sessions: list[list[bool]]) -> float:
    return sum(map(sum, sessions)) / sum(map(len, sessions))


def _draw_bars(names: list[str], series: dict[str, list[float]], title: str, path: Path) -> None:
    """Horizontal bars, one group a name, its numbers beside them."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 1.2 + 0.28 * len(names) * len(series)), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    height = 0.8 / len(series)
    for place, (label, values) in enumerate(series.items()):
        bars = axes.barh([row + place * height for row in range(len(names))], values, height, label=label)
        axes.bar_label(bars, fmt="%.3g", fontsize=7, padding=2)
    axes.set_yticks([row + 0.4 - height / 2 for row in range(len(names))], names, fontsize=8)
    axes.invert_yaxis()
    axes.set_title(title, fontsize=10)
    if len(series) > 1:
        axes.legend(fontsize=8)
    figure.savefig(path, dpi=130, metadata={"Software": None})
