"""Every benchmark once, in a small configuration, with its result under docs/results/ and the plots drawn anew.

    python scripts/bench.py                       # all, one after the other: under 40 minutes on two cores
    python scripts/bench.py serving_quarter score # some
    python scripts/bench.py gpu_kernels           # of those for a GPU, which run when they are named

A result names the command that made it, its commit, versions and machine; of a run of all, bench.json says how long each
took. Run it on a machine that does nothing else.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from pathlib import Path

import torch

from intentkv.evals.provenance import commit, provenance

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "docs" / "results"

# Each prints its table, and its figures as one JSON object on the last line.
PRINTED = {
    "reclaim": ["sim_reclaim.py"],
    "attention": ["bench_attention.py"],
    "kernels": ["bench_kernels.py", "--op", "compact,recover"],
    "score": ["bench_score.py"],
    "decode": ["bench_decode.py"],
    "overhead": ["bench_overhead.py"],
    "trace": ["bench_trace.py"],
    "serving_quarter": ["bench_serving.py", "--agents", "8", "--pool", "quarter"],
    "serving_ample": ["bench_serving.py", "--agents", "8", "--pool", "ample"],
}
ON_GPU = {
    "gpu_serving": ["bench_serving.py", "--agents", "8", "--pool", "quarter"],
    "gpu_kernels": ["bench_kernels.py", "--op", "compact,recover"],
    "gpu_decode": ["bench_decode.py", "--qwen3", "28", "16", "8"],
}
# Every published baseline beside the default, on sessions that nothing was chosen on.
SCORERS = [
    "intent", "streaming", "snapkv", "h2o", "keydiff", "expected-attention", "r-kv", "random", "random-sentence",
]  # fmt: skip
# These write their own file. One server plays all of an evaluation's configurations, as each request names its own.
WRITTEN = {
    "ablation_small": ["ablate_scores.py", "--sessions", "8"],
    "agents": ["eval_agents.py", "--sessions", "4", "--seed", "960", "--together", "4", "--scorers", *SCORERS],
}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    names = [*PRINTED, *WRITTEN]
    parser.add_argument("names", nargs="*", choices=[*names, *ON_GPU, []], help=f"default: all of {', '.join(names)}")
    asked = parser.parse_args().names or names
    waiting = [name for name in asked if name in ON_GPU]
    if waiting and not torch.cuda.is_available():
        sys.exit(f"bench: waits for a GPU: {', '.join(waiting)}; torch sees none here")
    prints = PRINTED | ON_GPU
    failed = []
    took: dict[str, int] = {}
    for name in asked:
        begin = time.monotonic()
        done = printed(name, prints[name]) if name in prints else written(name, WRITTEN[name])
        took[name] = round(time.monotonic() - begin)
        print(f"bench: {name} {'done' if done else 'FAILED'} in {took[name]} s", flush=True)
        failed += [] if done else [name]
    print(f"bench: {len(asked)} in {sum(took.values()) / 60:.1f} minutes", flush=True)
    if asked == names and not failed:
        result = {"kind": "bench", **provenance(["scripts/bench.py"]), "seconds": took, "total": sum(took.values())}
        (RESULTS / "bench.json").write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    if failed:
        sys.exit(f"bench: {', '.join(failed)} failed; their results were left as they were")
    return subprocess.run([sys.executable, str(ROOT / "scripts" / "plot_results.py")], check=False).returncode


def printed(name: str, command: list[str]) -> bool:
    """Run a benchmark and keep what it prints last; whether it succeeded."""
    run = subprocess.run(_line(command, "--json"), stdout=subprocess.PIPE, text=True, check=False, cwd=ROOT)
    print(run.stdout, flush=True)
    if run.returncode:
        return False
    figures = json.loads(run.stdout.strip().splitlines()[-1])
    result = {"kind": name, **provenance(["scripts/" + command[0], *command[1:]]), "figures": figures}
    RESULTS.mkdir(parents=True, exist_ok=True)
    (RESULTS / f"{name}.json").write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    return True


def written(name: str, command: list[str]) -> bool:
    """Run an evaluation that writes its own file; whether it succeeded. One that was killed goes on."""
    out = RESULTS / f"{name}.json"
    if is_over(out):
        out.with_suffix(".journal").unlink()
    return not subprocess.run(_line(command, "--out", str(out)), check=False, cwd=ROOT).returncode


def is_over(out: Path) -> bool:
    """Whether the journal beside `out`, if there is one, is of a run that was finished, or of another commit."""
    journal = out.with_suffix(".journal")
    if not journal.exists():
        return False
    if out.exists() and out.stat().st_mtime_ns >= journal.stat().st_mtime_ns:
        return True
    with open(journal) as file:
        plan = file.readline()
    return plan.endswith("\n") and json.loads(plan)["commit"] != commit()


def _line(command: list[str], *more: str) -> list[str]:
    return [sys.executable, str(ROOT / "scripts" / command[0]), *command[1:], *more]


if __name__ == "__main__":
    raise SystemExit(main())
