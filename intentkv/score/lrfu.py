"""Attention-aware LRFU: how useful each entry has been to the session's actions, recently and often (ActKV, Algorithm 1).

One number a logical position. Positions never change, so the state needs no care when slots do: a survivor keeps its
number, a dropped position takes its own along, and a text that goes another way is cut where it does.
"""

from collections import OrderedDict
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from intentkv.apply.rows import common_prefix
from intentkv.score.access import AccessClasses

Scores = NDArray[np.float32]


def nucleus(attention: Scores, top_p: float) -> NDArray[np.bool_]:
    """Which entries make up the first `top_p` of the attention mass, `[n]` bool: the hits.

    The smallest set of highest entries whose sum reaches `top_p` of the total; of equal entries the earlier is taken
    first. Entries without attention never belong to it.

    Args:
        attention: `[n]` float32, >= 0; need not sum to one.
        top_p: share of the mass, in (0, 1].
    """
    order = np.argsort(-attention, kind="stable")
    mass = np.cumsum(attention[order], dtype=np.float64)
    hits = np.zeros(len(attention), dtype=np.bool_)
    if len(mass) and mass[-1] > 0:
        hits[order[: int(np.searchsorted(mass, top_p * mass[-1])) + 1]] = True
    return hits & (attention > 0)


@dataclass
class KeepScores:
    """LRFU keep scores of one text, `KS <- lambda KS + score [hit]` once a region; new entries start at 0.

    Attributes:
        decay: lambda in [0, 1]. 0 is recency, 1 is frequency.
        top_p: share of a region's attention mass whose entries are hits.
        values: `[n]` float32 by position; grows with the text.
        access: the action access vectors of the same positions, by class.
    """

    decay: float
    top_p: float
    values: Scores = field(default_factory=lambda: np.zeros(0, np.float32))
    access: AccessClasses = field(default_factory=AccessClasses)

    def update(self, attention: Scores, visible: NDArray[np.int64]) -> None:
        """A region has ended.

        Args:
            attention: `[n]` float32, mean attention that the region's queries paid to each entry they saw.
            visible: `[n]` int64 ascending, the entries' positions. What the region could not see decays, and nothing is
                said about its access.
        """
        if len(visible):
            self.grow(int(visible[-1]) + 1)
        hits = nucleus(attention, self.top_p)
        self.values = self.values * np.float32(self.decay)
        self.values[visible[hits]] += attention[hits]
        self.access.add(visible, hits)

    def grow(self, length: int) -> None:
        """Make room for `length` positions."""
        self.values = np.pad(self.values, (0, max(0, length - len(self.values))))

    def at(self, positions: NDArray[np.int64]) -> Scores:
        """Keep scores of `positions`, `[n]` float32; 0 where no region has ended since they came in."""
        self.grow(int(positions[-1]) + 1 if len(positions) else 0)
        return self.values[positions]

    def beginning(self, length: int) -> "KeepScores":
        """A copy for a text that shares the first `length` positions."""
        return KeepScores(self.decay, self.top_p, self.values[:length].copy(), self.access.beginning(length))


class SessionKeepScores:
    """The keep scores that each session's last finished turn left; sessions beyond `max_sessions` push out the least
    recently used one.

    Args:
        decay, top_p: as of `KeepScores`.
        max_sessions: >= 1.
    """

    def __init__(self, decay: float, top_p: float, max_sessions: int) -> None:
        if not 0 <= decay <= 1 or not 0 < top_p <= 1 or max_sessions < 1:
            raise ValueError(
                "SessionKeepScores: expected a decay in [0, 1], a top_p in (0, 1] and max_sessions >= 1, "
                f"got {decay}, {top_p} and {max_sessions}"
            )
        self._decay, self._top_p, self._max_sessions = decay, top_p, max_sessions
        self._sessions: OrderedDict[str, tuple[NDArray[np.int32], KeepScores]] = OrderedDict()

    def open(self, session: str, tokens: NDArray[np.int32]) -> KeepScores:
        """The scores a new turn begins with: those of the text that it shares with the last one. The caller's own.

        Args:
            session: session key; nothing crosses keys.
            tokens: `[n]` int32, the prompt.
        """
        known = self._sessions.get(session)
        if known is None:
            return KeepScores(self._decay, self._top_p)
        self._sessions.move_to_end(session)
        return known[1].beginning(common_prefix(known[0], tokens))

    def note(self, session: str, tokens: NDArray[np.int32], scores: KeepScores) -> None:
        """A turn has finished. Of parallel turns of one session the last to finish is remembered.

        Args:
            tokens: `[n]` int32, prompt and answer; kept, not copied, as `scores` is.
        """
        self._sessions[session] = (tokens, scores)
        self._sessions.move_to_end(session)
        if len(self._sessions) > self._max_sessions:
            self._sessions.popitem(last=False)

    def clear(self) -> None:
        """Forget all sessions."""
        self._sessions.clear()

    def __len__(self) -> int:
        return len(self._sessions)
