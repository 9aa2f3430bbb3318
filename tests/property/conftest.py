"""Hypothesis profiles: `default` for every run, `fuzz` for a long one (`--hypothesis-profile=fuzz`). And the totals."""

import pytest
from hypothesis import HealthCheck, settings

from tests.property.totals import TOTALS

settings.register_profile(
    "default",
    max_examples=16,
    stateful_step_count=60,
    deadline=None,
    derandomize=True,
    suppress_health_check=list(HealthCheck),
)
settings.register_profile(
    "fuzz",
    max_examples=400,
    stateful_step_count=120,
    deadline=None,
    suppress_health_check=list(HealthCheck),
)
settings.load_profile("default")


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    if TOTALS:
        terminalreporter.write_line(
            "cache machine: " + ", ".join(f"{count:,} {name}" for name, count in TOTALS.items())
        )
