"""Hypothesis profiles: `default` for every run, `fuzz` for a long one (`--hypothesis-profile=fuzz`)."""

from hypothesis import HealthCheck, settings

QUIET = list(HealthCheck)
settings.register_profile("default", max_examples=16, stateful_step_count=60, deadline=None, suppress_health_check=QUIET, derandomize=True)
settings.register_profile("fuzz", max_examples=400, stateful_step_count=120, deadline=None, suppress_health_check=QUIET)
settings.load_profile("default")
from hypothesis import Phase
settings.register_profile("dev", max_examples=16, stateful_step_count=60, deadline=None, suppress_health_check=QUIET, derandomize=True, phases=[Phase.generate])
settings.register_profile("dev2", max_examples=60, stateful_step_count=100, deadline=None, suppress_health_check=QUIET, phases=[Phase.generate], database=None)
