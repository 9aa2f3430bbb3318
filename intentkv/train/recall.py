"""Recall at a budget: how much of what later calls needed an event would keep."""

from collections.abc import Callable, Mapping

import numpy as np
import torch
from torch import Tensor

from intentkv.keep.budget import Budget
from intentkv.keep.select import choose_drop
from intentkv.score.head.model import ResidualHead
from intentkv.train.dataset import Example, FeatureSet

BUDGETS = ("50%", "25%", "12%")


def row_recall(scores: Tensor, positive: Tensor, budget: Budget) -> float:
    """Share of the positives `[n]` that one event keeps which ranks the whole history by `scores` `[n]`."""
    nothing = np.empty(0, dtype=np.int64)
    drop = choose_drop(scores.numpy(), np.zeros(len(scores), dtype=np.bool_), nothing, budget, trigger=1)
    return 1.0 - float(positive[torch.from_numpy(drop)].sum()) / float(positive.sum())


def rankings(head: ResidualHead | None) -> dict[str, Callable[[Example], Tensor]]:
    """Name -> scores `[n]` of an example.

    Recency, the rules, with a head the published rule plus its correction, and what no ranking can exceed: all
    positives first.
    """
    named: dict[str, Callable[[Example], Tensor]] = {
        "recency": lambda example: example.row.positions.float(),
        "rule (intent-rule)": lambda example: example.row.rule,
        "rule, rescaled (intent-rescaled)": lambda example: example.row.rescaled,
    }
    if head is not None:
        named["rule + head (intent-head)"] = lambda example: head_scores(head, example)
    named["at most"] = lambda example: example.row.positive.float()
    return named


def head_scores(head: ResidualHead, example: Example) -> Tensor:
    """`s_j = rule_j + alpha * MLP(...)` of one example: `[n]`, with the graph of the head's parameters."""
    row = example.row
    correction: Tensor = head(example.keys, row.memory, row.rule, example.span_keys)
    return row.rule + correction


@torch.no_grad()
def recall(data: FeatureSet, named: Mapping[str, Callable[[Example], Tensor]]) -> dict[str, dict[str, float]]:
    """Name -> budget -> mean recall over the rows of `data`."""
    sums = {name: dict.fromkeys(BUDGETS, 0.0) for name in named}
    for i in range(len(data)):
        example = data[i]
        for name, score in named.items():
            scores = score(example)
            for budget in BUDGETS:
                sums[name][budget] += row_recall(scores, example.row.positive, Budget.parse(budget)) / len(data)
    return sums
