"""Hypothesis profiles: `default` for every run, `fuzz` for a long one (`make fuzz`). And the totals."""

import os
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings
from hypothesis.database import DirectoryBasedExampleDatabase

from tests.property.totals import TOTALS, told

FUZZ_FOLDER = Path("build/fuzz")
FUZZ_LIFE = 120  # steps of one random life
MACHINES = 7  # configurations that share INTENTKV_FUZZ_STEPS

settings.register_profile(
    "default",
    max_examples=20,
    stateful_step_count=60,
    deadline=None,
    derandomize=True,
    suppress_health_check=list(HealthCheck),
)
# Hypothesis keeps what fails, shrunk, in the database, and plays it first in the next run; the blob plays it anywhere.
settings.register_profile(
    "fuzz",
    max_examples=int(os.environ.get("INTENTKV_FUZZ_STEPS", "100000")) // (FUZZ_LIFE * MACHINES) + 1,
    stateful_step_count=FUZZ_LIFE,
    deadline=None,
    derandomize=False,
    database=DirectoryBasedExampleDatabase(FUZZ_FOLDER / "examples"),
    print_blob=True,
    suppress_health_check=list(HealthCheck),
)
settings.load_profile("default")


def pytest_exception_interact(node: pytest.Item, report: pytest.TestReport) -> None:
    """Keep the failure of a long run: the shrunk life, step by step, and the line that plays it again."""
    if settings.get_current_profile_name() == "fuzz":
        FUZZ_FOLDER.mkdir(parents=True, exist_ok=True)
        path = FUZZ_FOLDER / f"failure-{node.name.replace('/', '_')}.txt"
        path.write_text("\n".join([report.longreprtext, *(text for _, text in report.sections)]))


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    if TOTALS:
        violations = len(terminalreporter.stats.get("failed", ()))
        terminalreporter.write_line(f"cache machine: {told()}, {violations} violations")
        if violations and settings.get_current_profile_name() == "fuzz":
            terminalreporter.write_line(f"{FUZZ_FOLDER} has each failure; the next run plays it first")
