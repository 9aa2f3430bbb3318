"""The guard: how far a session's text is shared with others that may come back for it.

The radix tree cannot tell a fork of a session from the session's own next turn, and it forgets who put a text there.
Without the guard, the first of two forks that prunes would take the common beginning away from its idle sibling.
"""

from collections import OrderedDict
from collections.abc import Hashable

import numpy as np

from intentkv.apply.rows import common_prefix


class SharedText:
    """The last text of the users seen most recently.

    Args:
        max_users: users remembered; the one not seen for longest is forgotten first. Forgetting costs its next turn a
            longer prefill, as an eviction would.
    """

    def __init__(self, max_users: int = 256) -> None:
        self._max_users = max_users
        self._texts: OrderedDict[Hashable, tuple[Hashable, np.ndarray]] = OrderedDict()

    def note(self, user: Hashable, scope: Hashable, tokens: np.ndarray) -> None:
        """Remember that `user` may come back for `tokens`.

        Args:
            user: a session, or one anonymous request.
            scope: users of different scopes (extra key, cache salt) never share KV.
            tokens: `[n]` integers; kept, not copied.
        """
        self._texts[user] = (scope, tokens)
        self._texts.move_to_end(user)
        if len(self._texts) > self._max_users:
            self._texts.popitem(last=False)

    def shared(self, user: Hashable, scope: Hashable, tokens: np.ndarray, beyond: int) -> int:
        """Length of the longest beginning of `tokens` that another known user's text has too, or `beyond` if that is
        longer.

        Asking only for what lies `beyond` a position makes the usual answer cheap: one token a user is compared.
        """
        longest = beyond
        for other, (other_scope, text) in self._texts.items():
            if other == user or other_scope != scope or min(len(text), len(tokens)) <= longest:
                continue
            if text[longest] == tokens[longest]:
                longest = max(longest, common_prefix(text, tokens))
        return longest

    def forget(self, user: Hashable) -> None:
        self._texts.pop(user, None)

    def clear(self) -> None:
        self._texts.clear()
