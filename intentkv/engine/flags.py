"""The two hooks that are always there: one adds the flags, the other reads them.

Imported in every SGLang process, so it must stay cheap: no torch, nothing of SGLang but its hook registry.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any

from sglang.srt.plugins.hook_registry import HookRegistry, HookSource, HookType

from intentkv import config
from intentkv.engine.inventory import HookRow, load_rows

SOURCE = HookSource(plugin_name="intentkv", dist_name="intentkv")


def register_rows(rows: list[HookRow]) -> None:
    """Register inventory rows with SGLang; a row that is registered already stays as it is."""
    for row in (row for row in rows if row.is_patch):
        handler = row.load_handler()
        if not any(hook is handler for _, hook, _ in HookRegistry._hooks.get(row.target, ())):
            HookRegistry.register(row.target, handler, HookType(row.kind), source=SOURCE)


def hook_flags() -> None:
    register_rows(load_rows("flags"))


def add_flags_to_parser(result: None, parser: argparse.ArgumentParser) -> None:
    config.add_flags(parser)


def read_flags(original: Callable[..., Any], cls: type, args: argparse.Namespace) -> Any:
    """Build the server arguments as SGLang does, then activate if `--enable-intentkv` asks for it.

    Raises:
        SystemExit: intentkv was asked for and cannot serve; every reason is listed.
    """
    server_args = original(cls, args)
    if any(value for name, value in vars(args).items() if name == "enable_intentkv" or name.startswith("intentkv_")):
        from intentkv.engine import activation

        activation.activate_from_flags(args, server_args)
    return server_args
