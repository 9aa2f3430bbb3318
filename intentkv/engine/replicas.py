"""Data parallelism: all turns of a session go to one replica, since its record, its memory and its KV are there.

Each replica is a scheduler, or a group of ranks, with a pool of its own, and SGLang sends a request to the one that its balance
chooses. The front process knows the session before that, and fills in the field by which a client may choose: a new
session goes to the next replica in turn, and its later requests to where the first one went.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import Any

import numpy as np

from intentkv.config import RequestSettings
from intentkv.engine.activation import active_settings
from intentkv.engine.chat_format import message_format
from intentkv.engine.session_keys import request_key
from intentkv.observe.spans import find_spans


class Replicas:
    """Which replica has which session; kept by the front process's TokenizerManager. Sessions beyond `max_sessions` push out the least recently seen one.

    A session that was forgotten here goes to the next replica in turn, and begins anew there: slower, never wrong.
    """

    def __init__(self, count: int, max_sessions: int) -> None:
        """`count`: replicas, >= 1. `max_sessions`: remembered by each of them."""
        self._count = count
        self._max_sessions = count * max_sessions
        self._sessions: OrderedDict[str, int] = OrderedDict()
        self._next = 0

    def of(self, session: str) -> int:
        """The replica of a session key, in [0, count)."""
        if session not in self._sessions:
            self._sessions[session] = self._next
            self._next = (self._next + 1) % self._count
            if len(self._sessions) > self._max_sessions:
                self._sessions.popitem(last=False)
        self._sessions.move_to_end(session)
        return self._sessions[session]


class Router:
    """Fills in `routed_dp_rank`; one a TokenizerManager, which owns it."""

    def __init__(self, manager: Any) -> None:
        self._replicas = Replicas(manager.server_args.dp_size, active_settings().max_sessions)
        self._format = message_format(manager.tokenizer, manager.server_args.chat_template)

    def route(self, obj: Any, settings: RequestSettings, ids: np.ndarray) -> None:
        """Send a request, of the prompt `ids` `[n]` int64, to its session's replica, unless the client has chosen one."""
        if obj.routed_dp_rank is not None or not settings.enabled:
            return
        spans = find_spans(ids, self._format)
        key = request_key(settings, ids, spans, extra_key=obj.extra_key, cache_salt=obj.cache_salt, rid=obj.rid)
        if key.kind != "request":  # one that never comes again may go anywhere
            obj.routed_dp_rank = self._replicas.of(key.value)


def route(manager: Any, obj: Any, settings: RequestSettings, input_ids: list[int]) -> None:
    """Send a request to its session's replica; nothing to do where there is one scheduler."""
    if manager.server_args.dp_size == 1:
        return
    router = getattr(manager, "intentkv_router", None)
    if router is None:
        router = manager.intentkv_router = Router(manager)
    router.route(obj, settings, np.asarray(input_ids, dtype=np.int64))
