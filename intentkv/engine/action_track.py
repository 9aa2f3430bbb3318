"""What one running request has shown of its actions; owned by the request's state and gone with it.

Tokens come in as the scheduler commits them, attention as forwards compute it. With the overlap scheduler the forward of
a token runs before the host has read that token, so attention waits here until it has, and what turns out not to belong
to an action is thrown away. The first token of a region is then not observed: its forward was on its way already.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from torch import Tensor

from intentkv.apply.rows import live_positions
from intentkv.observe.action_regions import ActionRegions
from intentkv.score.lrfu import KeepScores


class ActionTrack:
    """Regions, recovered attention and keep scores of one request.

    Attributes:
        keep: the LRFU keep scores of its text, its own copy.
        regions: action regions ended in this request.
        round_over: a region has ended since the last event was looked at.
    """

    def __init__(self, regions: ActionRegions, keep: KeepScores, prompt_tokens: int) -> None:
        self.keep = keep
        self.regions = 0
        self.round_over = False
        self._text = regions
        self._prompt_tokens = prompt_tokens
        self._waiting: dict[int, tuple[Tensor, np.ndarray]] = {}  # by the query's position
        self.forget_region()

    @property
    def inside(self) -> bool:
        """Whether the tokens read so far end in an action region."""
        return self._text.inside

    def forget_region(self) -> None:
        """Drop what was observed of the open region: it begins, or the request computes its tokens again."""
        self._waiting.clear()
        self._sums = np.zeros(0, np.float32)
        self._visible = np.empty(0, np.int64)
        self._steps = 0

    def recovered(self, position: int, attention: Tensor, holes: np.ndarray) -> None:
        """A forward has recovered the attention of the query at `position`.

        Args:
            attention: `[n]` float32, of the live positions up to and including `position`, in order. On the host, or on
                its way there: it is not looked at before the host has read the next token, which the same stream brings.
            holes: `[h]` int64, the row's holes then.
        """
        self._waiting[position] = attention, holes

    def read(self, output: Sequence[int]) -> None:
        """Read on in the answer `output`, of which the beginning may have been read before."""
        for token in output[self._text.tokens :]:
            position = self._prompt_tokens + self._text.tokens - 1  # of the token read last
            if self._text.inside and position in self._waiting:
                self._fold(position)
            self._waiting = {p: w for p, w in self._waiting.items() if p > position}
            for edge in self._text.advance(int(token)):
                self._end_region() if edge.kind == "leave" else self.forget_region()

    def finish(self, output: Sequence[int]) -> None:
        """The answer has ended with `output`; so has its round."""
        self.read(output)
        if self._text.finish():
            self._end_region()
        self.round_over = True

    def _fold(self, position: int) -> None:
        attention, holes = self._waiting[position]
        self._visible = live_positions(0, position + 1, holes)
        self._sums = np.pad(self._sums, (0, position + 1 - len(self._sums)))
        self._sums[self._visible] += attention.numpy()
        self._steps += 1

    def _end_region(self) -> None:
        if self._steps:
            # Dropped in the meantime means dropped: only what the last query of the region saw counts.
            self.keep.update(self._sums[self._visible] / np.float32(self._steps), self._visible)
        self.regions += 1
        self.round_over = True
        self.forget_region()
