"""Mixed agents on a real server for half an hour: memory, counters and throughput must stay what they were.

python scripts/soak.py --minutes 30                             # `make soak`; writes docs/results/soak.json
python scripts/soak.py --minutes 5 --only-memory --stock        # the memory of SGLang alone with the same agents

Some agents drop by different scorers and budgets, one opted out. Every agent plays one new session after the other.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import json
import os
import random
import signal
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any, Final

import openai
import psutil
from rich.console import Console
from rich.table import Table

from intentkv.engine.doctor_server import examine_server
from intentkv.evals import soak
from intentkv.evals.client import play
from intentkv.evals.families import SHORT_FACTS
from intentkv.evals.load import read_metrics
from intentkv.evals.model import model_path
from intentkv.evals.provenance import provenance
from intentkv.evals.server import running_server
from intentkv.evals.sessions import make_session

RESULT = Path(__file__).resolve().parents[1] / "docs" / "results" / "soak.json"
MAX_SESSIONS = 32  # reached long before a quarter of the run: what is kept for sessions then takes no more memory
WINDOW = 300.0  # seconds
SAMPLE_SECONDS = 5.0
REST_SECONDS = 90.0  # an idle scheduler publishes its gauges twice a minute
AGENTS: list[dict[str, Any]] = [
    {"intentkv_scorer": "intent", "intentkv_budget": 256},
    {"intentkv_scorer": "intent-rescaled", "intentkv_budget": 512},
    {"intentkv_scorer": "snapkv", "intentkv_budget": 256},
    {"intentkv_scorer": "h2o", "intentkv_budget": "25%"},
    {"intentkv_scorer": "streaming", "intentkv_budget": 128},
    {"intentkv_enabled": False},
]
STOCK_FLAGS = ["--enable-metrics", "--max-total-tokens", "12288", "--chunked-prefill-size", "512"]
STOCK_FLAGS += ["--max-running-requests", str(len(AGENTS))]
FLAGS = ["--enable-intentkv", "--intentkv-trigger", "64", "--intentkv-max-sessions", str(MAX_SESSIONS), *STOCK_FLAGS]
# On a CPU with bf16 instructions PyTorch and oneDNN keep what they have prepared for a matrix product of one shape, 1024 shapes each
# by default. Every new number of tokens in a forward is four of them, 0.6 MB each, so any SGLang server grows until these caches
# are full, and then a little more as entries of other sizes take their place. A leak would hide in it. With one entry each it does not grow.
NO_CACHES: Final = {"ONEDNN_PRIMITIVE_CACHE_CAPACITY": "1", "LRU_CACHE_CAPACITY": "1"}

console = Console(stderr=True)


class Load:
    """Agents that play until told to stop; one that gets no answer stops at once, and the run has failed.

    Attributes:
        turns: when each turn was finished, seconds since the start. errors: what was not answered.
    """

    def __init__(self, url: str) -> None:
        self.turns: list[float] = []
        self.errors: list[str] = []
        self.begin = time.monotonic()
        self._stop = threading.Event()
        self._agents = [
            threading.Thread(target=self._play, args=(url, number, params)) for number, params in enumerate(AGENTS)
        ]
        for agent in self._agents:
            agent.start()

    def seconds(self) -> float:
        return time.monotonic() - self.begin

    def stop(self) -> None:
        """Every agent finishes the turn that it is in."""
        self._stop.set()
        for agent in self._agents:
            agent.join()

    def _play(self, url: str, number: int, params: dict[str, Any]) -> None:
        draw = random.Random(number)
        for seed in itertools.count(1000 * number):
            # Sessions of different lengths, so that the agents do not all begin a session at the same time.
            session = make_session(draw.choice(list(SHORT_FACTS.values())), seed, records=draw.randint(2, 5))
            try:
                for _ in play(session, url, params=params):
                    self.turns.append(self.seconds())
                    if self._stop.is_set():
                        return
            except openai.OpenAIError as error:
                self.errors.append(f"{session.name}: {error}")
                return


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=30.0, help="how long the agents play (default: 30)")
    parser.add_argument("--only-memory", action="store_true", help="print the memory; judge nothing and write nothing")
    parser.add_argument("--stock", action="store_true", help="SGLang without intentkv, with --only-memory")
    arguments = parser.parse_args()
    seconds = 60 * arguments.minutes
    if arguments.stock and not arguments.only_memory:
        parser.error("--stock: expected --only-memory beside it, since the verdict is about intentkv")
    if not arguments.only_memory and seconds < 2 * WINDOW:
        parser.error(f"--minutes: expected at least {2 * WINDOW / 60:.0f}, got {arguments.minutes:g}")
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # stopped by `kill` as by Ctrl-C: the server stops first
    environment = {name: os.environ.get(name, one) for name, one in NO_CACHES.items()}
    settings = [f"{name}={value}" for name, value in environment.items()]
    flags = STOCK_FLAGS if arguments.stock else FLAGS
    launcher = ("env", *settings, sys.executable, "-m", "sglang.launch_server")
    with (
        tempfile.TemporaryDirectory() as folder,
        running_server(model_path(), flags, Path(folder) / "server.log", launcher=launcher) as server,
    ):
        load, samples = Load(server.url), []
        try:
            while load.seconds() < seconds:
                time.sleep(SAMPLE_SECONDS)
                samples.append(look(load, server.url, server.pid))
        finally:
            load.stop()
        show_memory(samples)
        if arguments.only_memory:
            line = f"{len(load.turns)} turns; not answered: {load.errors or 'none'}; {' '.join(settings)}"
            console.print(line, markup=False, soft_wrap=True)
            return 1 if load.errors else 0
        at_rest = counters_at_rest(server.url)
        _, faults = examine_server(server.url)
    told = soak.figures(samples, load.turns, seconds, WINDOW, at_rest, MAX_SESSIONS)
    told.adrift.extend([*faults, *(f"not answered: {error}" for error in load.errors)])
    show(told)
    result = {
        "kind": "soak",
        **provenance(),
        "minutes": arguments.minutes,
        "flags": FLAGS,
        "environment": environment,
        "agents": AGENTS,
        "passed": told.passed,
        "figures": dataclasses.asdict(told),
        "turns": len(load.turns),
        "resident": [{"seconds": round(s.seconds), **s.resident} for s in samples[:: max(1, len(samples) // 60)]],
        "counters": {name: at_rest[name] for name in sorted(at_rest) if name.startswith("intentkv_")},
    }
    RESULT.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    return 0 if told.passed else 1


def look(load: Load, url: str, pid: int) -> soak.Sample:
    server = psutil.Process(pid)
    resident = {}
    for process in [server, *server.children(recursive=True)]:
        try:
            resident[f"{process.name()} ({process.pid})"] = process.memory_info().rss
        except psutil.NoSuchProcess:  # a helper that ended between the two calls
            continue
    return soak.Sample(load.seconds(), resident, read_metrics(url))


def counters_at_rest(url: str) -> dict[str, float]:
    """The counters once nothing is in use, or after REST_SECONDS whatever they are."""
    begin = time.monotonic()
    counters = read_metrics(url)
    while any(counters.get(name) for name in soak.AT_REST) and time.monotonic() - begin < REST_SECONDS:
        time.sleep(SAMPLE_SECONDS)
        counters = read_metrics(url)
    return counters


def show_memory(samples: list[soak.Sample]) -> None:
    """MiB of each process, at about a dozen moments of the run."""
    names = sorted(samples[-1].resident)
    table = Table("seconds", *names, title="resident memory, MiB")
    for sample in samples[:: max(1, len(samples) // 12)]:
        sizes = [f"{sample.resident.get(name, 0) / 2**20:.0f}" for name in names]
        table.add_row(f"{sample.seconds:.0f}", *sizes)
    Console().print(table)


def show(told: soak.Figures) -> None:
    table = Table("figure", "value", "expected", title=f"soak: {'passed' if told.passed else 'FAILED'}")
    table.add_row("memory of any process, from 1/4 to the end", f"{told.memory_growth:+.2%}", "within 2 %")
    table.add_row("counters adrift", str(len(told.adrift)), "0")
    table.add_row("turns per second, first 5 minutes", f"{told.first:.3f}", "")
    change = f" ({told.last / told.first - 1:+.1%})" if told.first else ""
    table.add_row("turns per second, last 5 minutes", f"{told.last:.3f}{change}", "within 5 % of the first")
    Console().print(table)
    for line in told.adrift:
        console.print(f"  - {line}", markup=False)


if __name__ == "__main__":
    raise SystemExit(main())
