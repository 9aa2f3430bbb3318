"""Names of the scorers and how each is made.

The factories import on call: the names are needed for `--help` in processes that must not load torch.
"""

from collections.abc import Callable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from intentkv.config import Settings
    from intentkv.score.base import Scorer


def _intent(settings: "Settings") -> "Scorer":
    from intentkv.score.rule import RuleScorer

    return RuleScorer("intent", temperature="rescaled")


def _intent_rule(settings: "Settings") -> "Scorer":
    from intentkv.score.rule import RuleScorer

    return RuleScorer("intent-rule", temperature=1.0)


def _intent_head(settings: "Settings") -> "Scorer":
    from pathlib import Path

    from intentkv.score.intent_head import IntentHeadScorer

    if settings.head is None:
        raise ValueError(f"scorer {HEAD_SCORER}: expected a head, got none: set --intentkv-head")
    return IntentHeadScorer.from_file(Path(settings.head))


def _streaming(settings: "Settings") -> "Scorer":
    from intentkv.score.streaming import StreamingScorer

    return StreamingScorer()


def _random(settings: "Settings") -> "Scorer":
    from intentkv.score.random import RandomScorer

    return RandomScorer()


HEAD_SCORER = "intent-head"  # the one that reads --intentkv-head

SCORERS: dict[str, "Callable[[Settings], Scorer]"] = {
    "intent": _intent,
    "intent-rule": _intent_rule,
    HEAD_SCORER: _intent_head,
    "streaming": _streaming,
    "random": _random,
}


def make_scorer(name: str, settings: "Settings") -> "Scorer":
    """The scorer called `name`, made for a server's settings. Raises ValueError listing the known names."""
    if name not in SCORERS:
        raise ValueError(f"scorer: expected one of {', '.join(SCORERS)}, got {name!r}")
    return SCORERS[name](settings)
