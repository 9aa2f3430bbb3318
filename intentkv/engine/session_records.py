"""What the cache remembers of a session between requests: texts, holes, and where in the tree their KV waits."""

from collections import OrderedDict
from collections.abc import Hashable
from dataclasses import dataclass
from typing import Final

import numpy as np

from intentkv.apply.namespace import Segment
from intentkv.apply.rows import common_prefix

BRANCHES: Final = 4  # pruned texts kept a session: its last turn, and parallel calls or edits that went another way
UNPRUNED_BRANCHES: Final = 16  # the same before its first event; they cost a match nothing


@dataclass(frozen=True)
class Record:
    """One text of a session as it stands in the tree.

    Attributes:
        scope: (extra key, cache salt) of the request that left it; requests of another scope must not match it.
        tokens: `[length]` int32, whole pages.
        holes: `[n]` int64, dropped positions, all below `length`.
        path: segments from position 0 to `length`. The nodes on it may be evicted at any time; a match walks the keys.
    """

    scope: Hashable
    tokens: np.ndarray
    holes: np.ndarray
    path: tuple[Segment, ...]


class SessionRecords:
    """Records by session, the session not seen for longest forgotten first.

    Args:
        max_sessions: sessions remembered. A forgotten session's namespace stays in the tree until it is evicted as
            least recently used, and its next turn matches the hole-free beginning only.
    """

    def __init__(self, max_sessions: int = 1024) -> None:
        self.max_sessions = max_sessions
        self._sessions: OrderedDict[str, list[Record]] = OrderedDict()

    def note(self, session: str, record: Record) -> list[Record]:
        """Remember the newest text of `session`; it replaces texts that it continues. Returns those it pushes out."""
        others = [r for r in self._sessions.get(session, []) if not _continues(record, r)]
        texts = [record, *others]
        pruned, unpruned = [r for r in texts if len(r.holes)], [r for r in texts if not len(r.holes)]
        over = pruned[BRANCHES:] + unpruned[UNPRUNED_BRANCHES:]
        self._sessions[session] = [r for r in texts if not any(r is out for out in over)]
        self._sessions.move_to_end(session)
        while len(self._sessions) > self.max_sessions:
            self._sessions.popitem(last=False)
        return over

    def of(self, session: str) -> tuple[Record, ...]:
        """Texts of `session`, the newest first."""
        return tuple(self._sessions.get(session, ()))

    def remove(self, session: str, record: Record) -> None:
        self._sessions[session] = [r for r in self._sessions[session] if r is not record]

    def forget(self, session: str) -> None:
        self._sessions.pop(session, None)

    def clear(self) -> None:
        self._sessions.clear()

    def live_tokens(self) -> int:
        """Live tokens of the newest text of every session; what of it was evicted since is not known here."""
        return sum(len(texts[0].tokens) - len(texts[0].holes) for texts in self._sessions.values() if texts)

    def __len__(self) -> int:
        return len(self._sessions)


def _continues(new: Record, old: Record) -> bool:
    return new.scope == old.scope and common_prefix(new.tokens, old.tokens) == len(old.tokens)
