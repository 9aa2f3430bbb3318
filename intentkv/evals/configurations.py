"""What an evaluation compares: the full cache, and every scorer at every budget under every layout.

Beside the layouts that a server has there is compaction as published: every turn prefills its whole prompt, is compacted
once and forgotten. It is a matter of how a server is asked, see docs/baselines.md.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal, get_args

from intentkv.config import Layout

FULL = "full"
AS_PUBLISHED: Final = "as-published"
AUTO: Final = "auto"
LAYOUTS: Final = (*get_args(Layout), AS_PUBLISHED)


@dataclass(frozen=True)
class Configuration:
    """One way of serving a session.

    Attributes:
        scorer: None for the full cache.
        percent: the budget as a share of the mean number of tokens that the sessions have at their end with the full
            cache. It is the same number for every turn of every session: a share of what a turn has would drop from the
            first turn on, and could not be compared with what a fixed budget drops. AUTO leaves it to the server.
        layout: one of LAYOUTS.
    """

    scorer: str | None
    percent: float | Literal["auto"]
    layout: str

    @property
    def key(self) -> str:
        """`full`, or `scorer@budget`; a layout other than the default one is named too: `snapkv@25%/mask`."""
        if self.scorer is None:
            return FULL
        budget = f"{self.scorer}@{self.percent if self.percent == AUTO else f'{self.percent:g}%'}"
        return budget if self.layout == "reclaim" else f"{budget}/{self.layout}"

    @property
    def forgets(self) -> bool:
        """Whether every turn is computed anew, from its whole prompt."""
        return self.layout == AS_PUBLISHED and self.scorer is not None

    def params(self, mean_final: float) -> dict[str, Any]:
        """Custom parameters of every request; `mean_final`: tokens that the sessions have at their end, on average.

        The budget is that of the history: system prompt, newest message and recent tail come on top of it.
        """
        if self.scorer is None:
            return {"intentkv_enabled": False}
        budget = AUTO if self.percent == AUTO else max(1, round(mean_final * self.percent / 100))
        return {"intentkv_scorer": self.scorer, "intentkv_budget": budget}


def layout_flags(layout: str) -> list[str]:
    """Flags of the server that plays `layout`."""
    return ["--intentkv-layout", "reclaim" if layout == AS_PUBLISHED else layout]


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
