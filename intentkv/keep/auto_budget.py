"""The budget that grows where the model gets less sure of itself, and never shrinks (ActKV, Algorithm 2)."""

from collections import OrderedDict
from dataclasses import dataclass, field
from typing import Final

from intentkv.keep.budget import Budget
from intentkv.observe.confidence import ConfidenceTrace

NO_EVIDENCE: Final = 0.0  # the slope of a session that has written too little


@dataclass
class _Session:
    tokens: int
    trace: ConfidenceTrace = field(default_factory=ConfidenceTrace)
    decided_at: int = 0  # windows of the trace when the budget was last decided
    slope: float = NO_EVIDENCE


class AutoBudgets:
    """One budget a session, decided before each compression: `B <- min(growth B, most)` where the slope is below 0.

    A decision needs new evidence: without another window of the trace since the last one, the budget stays, however
    many events there are. Sessions beyond `max_sessions` push out the least recently used one.

    Args:
        first: tokens a session starts with.
        most: tokens it never exceeds.
        growth: factor, > 1.
        max_sessions: >= 1.
    """

    def __init__(self, first: int, most: int, growth: float, max_sessions: int) -> None:
        if not 1 <= first <= most or not growth > 1 or max_sessions < 1:
            raise ValueError(
                "AutoBudgets: expected 1 <= first <= most, growth above 1 and max_sessions >= 1, "
                f"got {first}, {most}, {growth} and {max_sessions}"
            )
        self._first, self._most, self._growth, self._max_sessions = first, most, growth, max_sessions
        self._sessions: OrderedDict[str, _Session] = OrderedDict()

    def observe(self, session: str, confidence: float) -> None:
        """The session has written a token with this confidence (`observe.confidence.token_confidence`)."""
        self._of(session).trace.append(confidence)

    def decide(self, session: str) -> Budget:
        """The session's budget for the event at hand."""
        known = self._of(session)
        if len(known.trace) > known.decided_at:
            known.decided_at = len(known.trace)
            known.slope = known.trace.slope()
            if known.slope < 0:
                known.tokens = min(int(known.tokens * self._growth), self._most)
        return Budget("auto", known.tokens)

    def slope(self, session: str) -> float:
        """The slope that the session's last decision saw, in nats a step of the trace."""
        return self._of(session).slope

    def clear(self) -> None:
        """Forget all sessions."""
        self._sessions.clear()

    def __len__(self) -> int:
        return len(self._sessions)

    def _of(self, session: str) -> _Session:
        known = self._sessions.setdefault(session, _Session(self._first))
        self._sessions.move_to_end(session)
        if len(self._sessions) > self._max_sessions:
            self._sessions.popitem(last=False)
        return known
