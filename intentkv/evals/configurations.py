"""What an evaluation compares: the full cache, and every scorer at every budget under every layout."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Configuration:
    """One way of serving a session.

    Attributes:
        scorer: None for the full cache.
        percent: the budget as a share of the tokens that the session has at its end with the full cache.
        layout: of the server.
    """

    scorer: str | None
    percent: float
    layout: str

    @property
    def key(self) -> str:
        """`full`, or `scorer@budget`; a layout other than the default one is named too: `snapkv@25%/mask`."""
        if self.scorer is None:
            return "full"
        budget = f"{self.scorer}@{self.percent:g}%"
        return budget if self.layout == "reclaim" else f"{budget}/{self.layout}"

    def params(self, final_tokens: int) -> dict[str, Any]:
        """Custom parameters of every request of a session that ends with `final_tokens` tokens.

        The budget is that of the history: system prompt, newest message and recent tail come on top of it.
        """
        if self.scorer is None:
            return {"intentkv_enabled": False}
        tokens = max(1, round(final_tokens * self.percent / 100))
        return {"intentkv_scorer": self.scorer, "intentkv_budget": tokens}


def by_layout(
    scorers: Sequence[str], percents: Sequence[float], layouts: Sequence[str]
) -> dict[str, list[Configuration]]:
    """The configurations that each layout's server plays, in order. The full cache comes first, once."""
    plan = {
        layout: [Configuration(scorer, percent, layout) for scorer in scorers for percent in percents]
        for layout in layouts
    }
    plan[layouts[0]].insert(0, Configuration(None, 100, layouts[0]))
    return plan
