"""Draws every evaluation of agent sessions under docs/results/: accuracy against mean live tokens, one line a scorer.

python scripts/plot_results.py                       # docs/results/*.json, each beside its file as .png
python scripts/plot_results.py result.json ...
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from intentkv.evals.plot import draw_agents

RESULTS = Path(__file__).resolve().parents[1] / "docs" / "results"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", nargs="*", type=Path, help="result files (default: all under docs/results)")
    for path in parser.parse_args().files or sorted(RESULTS.glob("*.json")):
        result = json.loads(path.read_text())
        if result.get("kind") == "agents":
            draw_agents(result, path.with_suffix(".png"))
            print(path.with_suffix(".png"))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
