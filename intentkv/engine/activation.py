"""Switching intentkv on: every hook declared, checked, applied and proved, or the server does not start.

SGLang's plug-in loader logs and swallows exceptions, so refusals leave as SystemExit.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import sys
from typing import Any

from sglang.srt.plugins.hook_registry import HookRegistry

from intentkv import config
from intentkv.config import Settings
from intentkv.engine import inventory, support
from intentkv.engine.flags import register_rows
from intentkv.errors import SettingsError
from intentkv.plugin import SETTINGS_ENV

CACHE_BACKEND = "intentkv"

_active: Settings | None = None


def active_settings() -> Settings:
    """Settings in force in this process.

    Raises:
        RuntimeError: intentkv is not active here; a hook ran that should not be in place.
    """
    if _active is None:
        raise RuntimeError("intentkv is not active in this process: its hooks must not run here")
    return _active


def refuse(reasons: list[str]) -> None:
    """Stop the start with every reason, one a line."""
    lines = "\n".join(f"  - {reason}" for reason in reasons)
    raise SystemExit(f"intentkv cannot serve with this configuration ({len(reasons)} reasons):\n{lines}")


def activate_from_flags(args: argparse.Namespace, server_args: Any) -> None:
    """Activate in the process that parsed the command line, and tell the processes it will start.

    Raises:
        SystemExit: with every reason found in flags, hooks and server arguments.
    """
    reasons: list[str] = []
    settings = None
    try:
        settings = config.settings_from_flags(args)
    except SettingsError as error:
        reasons += error.reasons
    pins = inventory.load_pins(inventory.sglang_version())
    reasons += inventory.problems_before(inventory.load_rows(), pins)
    reasons += support.reasons_against(server_args)
    if reasons:
        refuse(reasons)
    if settings is not None:
        os.environ[SETTINGS_ENV] = json.dumps(settings.to_dict())
        _apply(settings)


def activate_from_environment(text: str) -> None:
    """Activate in a process that got the settings through the environment: a child of the server, or an Engine user.

    The detokenizer runs nothing that is hooked, and importing the scheduler there would only cost memory.
    """
    if multiprocessing.parent_process() is not None and "sglang.srt.managers.scheduler" not in sys.modules:
        return
    try:
        settings = Settings.from_dict(json.loads(text))
    except (SettingsError, ValueError, TypeError) as error:
        refuse([f"{SETTINGS_ENV} is not a valid settings object ({error}): set it with intentkv.enable()"])
    problems = inventory.problems_before(inventory.load_rows(), inventory.load_pins(inventory.sglang_version()))
    if problems:
        refuse(problems)
    _apply(settings)


def prove() -> None:
    """Check again that every row is in force here; another plug-in may have come later.

    Raises:
        SystemExit: a row is not in force.
    """
    problems = inventory.problems_after(inventory.load_rows())
    if problems:
        refuse(problems)


def _apply(settings: Settings) -> None:
    global _active
    if _active == settings:
        return
    if _active is not None:
        refuse([f"intentkv is active with {_active} already and cannot change to {settings}: restart the process"])
    _active = settings
    _register_extension_points(settings)
    register_rows(inventory.load_rows())
    HookRegistry.apply_hooks()
    prove()


def _register_extension_points(settings: Settings) -> None:
    from sglang.srt.arg_groups.overrides import declare_resolution, resolved_view
    from sglang.srt.arg_groups.resolution_hooks import register_resolution_hook

    from intentkv.engine import live_backends
    from intentkv.engine.cache import register_backend
    from intentkv.score.registry import make_scorer

    register_backend(settings.layout, settings.max_sessions, CACHE_BACKEND)
    live_backends.register(lambda: make_scorer(settings.scorer, settings).needs)

    @register_resolution_hook("handle_missing_default_values")
    def choose_cache(server_args: Any, previous: Any) -> None:
        previous(server_args)
        declare_resolution(server_args, "intentkv", radix_cache_backend=CACHE_BACKEND)

    @register_resolution_hook("handle_other_validations")
    def check_resolved(server_args: Any, previous: Any) -> None:
        previous(server_args)
        reasons = support.reasons_against(resolved_view(server_args), resolved=True)
        reasons += support.reasons_against_model(server_args)
        reasons += support.reasons_against_ranks(server_args, settings.scorer)
        if settings.head is not None:
            reasons += support.reasons_against_head(server_args, settings.head)
        if reasons:
            refuse(reasons)
