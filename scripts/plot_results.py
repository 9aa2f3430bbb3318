"""Draws what lies under docs/results/: of agent sessions accuracy against mean live tokens, of ActKV's the turns, of benchmarks the main figures.

python scripts/plot_results.py                       # docs/results/*.json, each beside its file as .png
python scripts/plot_results.py result.json ...
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from intentkv.evals.plot import DRAWN, draw_ablation, draw_actkv, draw_agents, draw_figures

RESULTS = Path(__file__).resolve().parents[1] / "docs" / "results"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", nargs="*", type=Path, help="result files (default: all under docs/results)")
    for path in parser.parse_args().files or sorted(RESULTS.glob("*.json")):
        result = json.loads(path.read_text())
        kind = result.get("kind")
        own = {"agents": draw_agents, "ablation": draw_ablation, "actkv": draw_actkv}
        draw = own.get(kind, draw_figures if kind in DRAWN else None)
        if draw is not None:
            draw(result, path.with_suffix(".png"))
            print(path.with_suffix(".png"))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
