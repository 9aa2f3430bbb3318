"""From a trace to training rows: one a turn, with the features that the serving code computes and literal labels."""

from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from intentkv.config import Settings
from intentkv.keep.forced import forced_mask
from intentkv.keep.select import candidates
from intentkv.observe.spans import find_spans, query_positions
from intentkv.score.base import ScoreInput
from intentkv.score.head.features import SPAN_TOKENS, mean_keys, mean_memory
from intentkv.score.memory import QueryMemory
from intentkv.score.rule import RuleScorer
from intentkv.train.capture import CaptureModel
from intentkv.train.labels import NEXT_CALLS, argument_values, evidence, label_tokens
from intentkv.train.render import Rendered, Renderer

_NO_HOLES = np.empty(0, dtype=np.int64)


@dataclass(frozen=True)
class Row:
    """One event: the history of a turn's prompt, n candidates.

    Attributes:
        positions: `[n]` int64, logical positions of the candidates, ascending.
        rule, rescaled: `[n]` float32, the published rule score, which is a feature; and that with the queries' own norm
            given back, to compare with.
        memory: `[D]` float32, the mean of M_t over layers and heads.
        memory_error: mean over layers and heads of (|M_t| - 1)^2.
        span: `[q]` int64, positions of the query span, at most the last 4,096.
        positive: `[n]` bool, an argument of one of the next 5 calls literally occurs there.
        counted: `[n]` bool, False for tokens of the template, which take no part in the loss.
    """

    positions: Tensor
    rule: Tensor
    rescaled: Tensor
    memory: Tensor
    memory_error: float
    span: Tensor
    positive: Tensor
    counted: Tensor


@dataclass
class Tally:
    """What became of the turns of all traces."""

    rows: int = 0
    tokens: int = 0
    without_history: int = 0
    without_positive: int = 0
    rewritten: int = 0


@dataclass
class TraceRows:
    """The rows of one trace; `keys` `[N, D]` float32, the mean over layers and heads of every token's rotated keys."""

    keys: Tensor
    rows: list[Row] = field(default_factory=list)


class ExampleMaker:
    """Makes rows with one model, with the memory's decay and the recent tail that a server has by default."""

    def __init__(self, model: CaptureModel, renderer: Renderer) -> None:
        defaults = Settings()
        self._model = model
        self._renderer = renderer
        self._decay, self._recent = defaults.memory_decay, defaults.recent
        self._rule = RuleScorer("intent-rule", temperature=1.0)
        self._rescaled = RuleScorer("rescaled", temperature="rescaled")
        self.tally = Tally()

    def make(self, rendered: Rendered) -> TraceRows:
        """The rows of one rendered trace; turns without history or without a positive are dropped and tallied.

        One forward of the whole trace serves all turns: a causal model computes the same for a prompt and for the
        prompt within a longer text. Every turn updates the memory, whether it gives a row or not.
        """
        spans = [find_spans(rendered.ids[: turn.tokens], self._renderer.format) for turn in rendered.turns]
        captured = self._model.forward(torch.from_numpy(rendered.ids), [span.query for span in spans])
        layers = len(captured.keys)
        trace = TraceRows(mean_keys(captured.keys.__getitem__, torch.arange(len(rendered.ids)), layers))
        sessions = QueryMemory(self._decay, max_sessions=1)
        self.tally.tokens += len(rendered.ids)
        self.tally.rewritten += rendered.rewritten
        for turn, span, seen in zip(rendered.turns, spans, captured.queries, strict=True):
            query = seen.mean()
            memory = sessions.update("trace", query)
            positions = candidates(forced_mask(turn.tokens, span, self._recent), _NO_HOLES)
            asked = query_positions(span, turn.tokens, _NO_HOLES)[-SPAN_TOKENS:]
            values = [value for call in turn.calls[:NEXT_CALLS] for value in argument_values(call)]
            matches = evidence(rendered.text[: turn.chars], values)
            counted = rendered.content[positions]
            positive = label_tokens(rendered.offsets[positions], matches) & counted
            if not len(positions):
                self.tally.without_history += 1
            elif not positive.any():
                self.tally.without_positive += 1
            else:
                slots = torch.from_numpy(positions)
                x = ScoreInput(
                    layer_keys=captured.keys.__getitem__,
                    slots=slots,
                    positions=slots,
                    memory=memory,
                    query=query,
                    seed=0,
                    num_layers=layers,
                    share=1.0,  # neither the rule nor the head reads it, nor the segments
                    segments=torch.zeros_like(slots),
                    query_slots=torch.from_numpy(asked),
                )
                trace.rows.append(
                    Row(
                        positions=slots,
                        rule=self._rule.score(x),
                        rescaled=self._rescaled.score(x),
                        memory=mean_memory(memory),
                        memory_error=float((memory.norm(dim=-1) - 1).square().mean()),
                        span=x.query_slots,
                        positive=torch.from_numpy(positive),
                        counted=torch.from_numpy(counted),
                    )
                )
        self.tally.rows += len(trace.rows)
        return trace
