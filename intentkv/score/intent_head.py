"""The rule score with the residual head's correction."""

from pathlib import Path

from torch import Tensor

from intentkv.score.base import Need, ScoreInput
from intentkv.score.head.features import residual
from intentkv.score.head.io import load_head
from intentkv.score.head.model import ResidualHead
from intentkv.score.rule import RuleScorer


class IntentHeadScorer:
    """`s_j = rule_j + alpha * MLP(phi_j (+) c_j)` (IntentKV), the rule as published; an untrained head changes no bit of it."""

    name = "intent-head"
    needs: frozenset[Need] = frozenset()

    def __init__(self, head: ResidualHead) -> None:
        """`head`: moved to the keys' device at the first score."""
        self._rule = RuleScorer(self.name, temperature=1.0)
        self._head = head.eval().requires_grad_(False)

    @classmethod
    def from_file(cls, path: Path) -> "IntentHeadScorer":
        """With the head of a checkpoint. Raises SettingsError with every reason why it cannot be used."""
        return cls(load_head(path)[0])

    def score(self, x: ScoreInput) -> Tensor:
        """`[n]` float32 on the device of `x.slots`. Raises ValueError if memory, head and keys do not fit each other."""
        rule = self._rule.score(x)
        if x.memory.shape[-1] != self._head.head_dim:
            raise ValueError(
                f"{self.name}: the head is for D = {self._head.head_dim}, the keys have D = {x.memory.shape[-1]}"
            )
        return rule.add_(residual(self._head.to(rule.device), x, rule))
