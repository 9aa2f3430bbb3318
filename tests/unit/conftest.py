"""Hypothesis without a deadline: on a shared machine the time of one example says nothing."""

from hypothesis import settings

settings.register_profile("unit", deadline=None, derandomize=True)
settings.load_profile("unit")
