"""Entry point of the `sglang.srt.plugins` group, and the switch for programs that build a `sglang.Engine` themselves.

SGLang calls `register` in every process it starts. Without `--enable-intentkv` it leaves two hooks, the ones that add
and read the flags, and imports nothing else of this package but what they need.
"""

from __future__ import annotations

import json
import os
import sys

SETTINGS_ENV = "INTENTKV_SETTINGS"


def register() -> None:
    """Hook the flags; where settings were handed down through the environment, activate too.

    Raises:
        SystemExit: activation found reasons not to serve (SGLang's loader swallows ordinary exceptions).
    """
    from intentkv.engine import flags

    flags.hook_flags()
    handed_down = os.environ.get(SETTINGS_ENV)
    if handed_down:
        from intentkv.engine import activation

        activation.activate_from_environment(handed_down)


def enable(**settings: object) -> None:
    """Turn intentkv on for a `sglang.Engine` built later in this process; keywords as the flags, without the prefix.

        import intentkv, sglang
        intentkv.enable(budget="25%", scorer="intent")
        engine = sglang.Engine(model_path=...)

    Raises:
        SettingsError: every bad value, with what is allowed.
        RuntimeError: SGLang has loaded its plug-ins already, so that it would quietly stay off.
    """
    from intentkv.config import settings_from_kwargs

    checked = settings_from_kwargs(**settings)
    plugins = sys.modules.get("sglang.srt.plugins")
    if plugins is not None and plugins._plugins_loaded:
        raise RuntimeError(
            "SGLang has loaded its plug-ins in this process already: call intentkv.enable() before the first Engine"
        )
    os.environ[SETTINGS_ENV] = json.dumps(checked.to_dict())
