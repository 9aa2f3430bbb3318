"""Entry point of the `sglang.srt.plugins` group.

SGLang calls `register` in every process it starts. Without `--enable-intentkv` it leaves two hooks, the ones that add
and read the flags, and imports nothing else of this package but what they need.
"""

from __future__ import annotations

import os

SETTINGS_ENV = "INTENTKV_SETTINGS"


def register() -> None:
    """Hook the flags; in a child of a server that runs intentkv, activate here too.

    Raises:
        SystemExit: activation found reasons not to serve (SGLang's loader swallows ordinary exceptions).
    """
    from intentkv.engine import flags

    flags.hook_flags()
    handed_down = os.environ.get(SETTINGS_ENV)
    if handed_down:
        from intentkv.engine import activation

        activation.activate_from_environment(handed_down)
