"""Names of the scorers and how each is made.

The factories import on call: the names are needed for `--help` in processes that must not load torch.
"""

from collections.abc import Callable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from intentkv.config import Settings
    from intentkv.score.base import Scorer

HEAD_SCORER = "intent-head"  # the one that reads --intentkv-head

# Those that look at all query heads of a KV head together, so that the ranks of one KV head cannot add up what each has of it.
WHOLE_GROUPS = frozenset({"actkv", "expected-attention", "r-kv"})


def _intent(settings: "Settings") -> "Scorer":
    from intentkv.score.intent import IntentScorer

    return IntentScorer()


def _intent_rule(settings: "Settings") -> "Scorer":
    from intentkv.score.rule import RuleScorer

    return RuleScorer("intent-rule", temperature=1.0)


def _intent_rescaled(settings: "Settings") -> "Scorer":
    from intentkv.score.rule import RuleScorer

    return RuleScorer("intent-rescaled", temperature="rescaled")


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


def _random_sentence(settings: "Settings") -> "Scorer":
    from intentkv.score.random_sentence import RandomSentenceScorer

    return RandomSentenceScorer()


def _snapkv(settings: "Settings") -> "Scorer":
    from intentkv.score.snapkv import SnapKVScorer

    return SnapKVScorer()


def _h2o(settings: "Settings") -> "Scorer":
    from intentkv.score.h2o import H2OScorer

    return H2OScorer()


def _keydiff(settings: "Settings") -> "Scorer":
    from intentkv.score.keydiff import KeyDiffScorer

    return KeyDiffScorer()


def _expected_attention(settings: "Settings") -> "Scorer":
    from intentkv.score.expected_attention import ExpectedAttentionScorer

    return ExpectedAttentionScorer()


def _r_kv(settings: "Settings") -> "Scorer":
    from intentkv.score.r_kv import RKVScorer

    return RKVScorer()


def _actkv(settings: "Settings") -> "Scorer":
    from intentkv.score.actkv import ActKVScorer

    return ActKVScorer()


SCORERS: dict[str, "Callable[[Settings], Scorer]"] = {
    "intent": _intent,
    "intent-rule": _intent_rule,
    "intent-rescaled": _intent_rescaled,
    "actkv": _actkv,
    HEAD_SCORER: _intent_head,
    "streaming": _streaming,
    "random": _random,
    "random-sentence": _random_sentence,
    "snapkv": _snapkv,
    "h2o": _h2o,
    "keydiff": _keydiff,
    "expected-attention": _expected_attention,
    "r-kv": _r_kv,
}


def make_scorer(name: str, settings: "Settings") -> "Scorer":
    """The scorer called `name`, made for a server's settings. Raises ValueError listing the known names."""
    if name not in SCORERS:
        raise ValueError(f"scorer: expected one of {', '.join(SCORERS)}, got {name!r}")
    return SCORERS[name](settings)
