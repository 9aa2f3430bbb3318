"""How many history tokens an event keeps."""

from dataclasses import dataclass
from typing import Literal

from intentkv import checks


@dataclass(frozen=True)
class Budget:
    """How many history tokens an event keeps. Forced tokens (system prefix, newest message, recent tail) come on top.

    Attributes:
        kind: `fixed` (a number of tokens), `share` (a percentage of the history), or `auto` (driven by the model's
            confidence, see `keep.auto_budget`).
        value: tokens for `fixed`, percent in (0, 100] for `share`; tokens a session is at for `auto`, 0 in a setting.
    """

    kind: Literal["fixed", "share", "auto"]
    value: int | float

    @classmethod
    def parse(cls, raw: object) -> "Budget":
        """Read `8192`, `"8192"`, `"25%"` or `"auto"`. Raises ValueError saying what is allowed."""
        if isinstance(raw, Budget):
            return raw
        if raw == "auto":
            return cls("auto", 0)
        if isinstance(raw, str) and raw.endswith("%"):
            percent = checks.as_float(raw[:-1])
            if percent is not None and 0 < percent <= 100:
                return cls("share", percent)
        tokens = checks.as_int(raw)
        if tokens is not None and 1 <= tokens <= checks.MAX_TOKENS:
            return cls("fixed", tokens)
        raise ValueError(
            f"expected a number of tokens from 1 to {checks.MAX_TOKENS}, a share of the history "
            f"above 0% and up to 100%, or auto, got {checks.shown(raw)}"
        )

    def tokens(self, history_len: int) -> int:
        """The budget in tokens for a history of `history_len` logical positions (dropped ones included)."""
        if self.kind != "share":
            return int(self.value)
        return int(history_len * self.value / 100)

    def share(self, history_len: int) -> float:
        """The part of such a history that the budget is, in (0, 1]."""
        return min(1.0, max(1, self.tokens(history_len)) / max(1, history_len))

    def __str__(self) -> str:
        if self.kind == "auto":
            return "auto"
        if self.kind == "fixed":
            return str(self.value)
        return f"{int(self.value) if float(self.value).is_integer() else self.value}%"


DEFAULT_BUDGET = Budget("fixed", 8192)
