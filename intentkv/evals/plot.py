"""The plot of an evaluation of agent sessions."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from intentkv.evals.configurations import FULL


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
