"""How many history tokens an event keeps."""

from dataclasses import dataclass
from typing import Literal

from intentkv import checks


@dataclass(frozen=True)
class Budget:
    """How many history tokens an event keeps. Forced tokens (system prefix, newest message, recent tail) come on top.

    Attributes:
        kind: `fixed` (a number of tokens) or `share` (a percentage of the history).
        value: tokens for `fixed`, percent in (0, 100] for `share`.
    """

    kind: Literal["fixed", "share"]
    value: int | float

    @classmethod
    def parse(cls, raw: object) -> "Budget":
        """Read `8192`, `"8192"` or `"25%"`. Raises ValueError saying what is allowed."""
        if isinstance(raw, Budget):
            return raw
        if raw == "auto":
            raise ValueError(
                "'auto' (driven by the model's confidence) is not available in this version; "
                "give a number of tokens such as 8192, or a share of the history such as 25%"
            )
        if isinstance(raw, str) and raw.endswith("%"):
            percent = checks.as_float(raw[:-1])
            if percent is not None and 0 < percent <= 100:
                return cls("share", percent)
        tokens = checks.as_int(raw)
        if tokens is not None and 1 <= tokens <= checks.MAX_TOKENS:
            return cls("fixed", tokens)
        raise ValueError(
            f"expected a number of tokens from 1 to {checks.MAX_TOKENS}, or a share of the history "
            f"above 0% and up to 100%, got {checks.shown(raw)}"
        )

    def tokens(self, history_len: int) -> int:
        """The budget in tokens for a history of `history_len` logical positions (dropped ones included)."""
        if self.kind == "fixed":
            return int(self.value)
        return int(history_len * self.value / 100)

    def __str__(self) -> str:
        if self.kind == "fixed":
            return str(self.value)
        return f"{int(self.value) if float(self.value).is_integer() else self.value}%"


DEFAULT_BUDGET = Budget("fixed", 8192)
