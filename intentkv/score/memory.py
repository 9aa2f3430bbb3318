"""What each session has been asking for, as one query vector per layer and head."""

import math
from collections import OrderedDict

import torch
from torch import Tensor


class QueryMemory:
    """QueryMemory of IntentKV: `M_t = exp(-lambda) M_(t-1) + Enc(q_t)`, each `[l, h]` then scaled to unit norm.

    Sessions beyond `max_sessions` push out the least recently used one. Keys come from
    `intentkv.observe.session.session_key`, which puts `extra_key` and `cache_salt` in; nothing crosses keys here.
    A tensor handed out is never written to again, so a score that is still running keeps the memory it began with.
    """

    def __init__(self, decay: float, max_sessions: int) -> None:
        """`decay`: lambda, >= 0. `max_sessions`: >= 1. Raises ValueError otherwise."""
        if not (decay >= 0 and math.isfinite(decay)) or max_sessions < 1:
            raise ValueError(
                f"QueryMemory: expected a finite decay >= 0 and max_sessions >= 1, got {decay} and {max_sessions}"
            )
        self._kept = math.exp(-decay)
        self._max_sessions = max_sessions
        self._memories: OrderedDict[str, Tensor] = OrderedDict()

    def preview(self, key: str, enc: Tensor) -> Tensor:
        """M_t as `update` would make it, without keeping it: for an event before the turn's query is complete.

        Args:
            key: session key.
            enc: `[L, H_q, D]`, any float dtype; Enc(q_t), the mean of the rotated queries over the actionable span.

        Returns:
            M_t, `[L, H_q, D]` float32 on `enc`'s device; unit norm per `[l, h]`, and zero where all input was zero.

        Raises:
            ValueError: `enc` has not three dimensions, or another shape than this session's memory.
        """
        previous = self._memories.get(key)
        expected = "[L, H_q, D]" if previous is None else str(list(previous.shape))
        if enc.ndim != 3 or (previous is not None and previous.shape != enc.shape):
            raise ValueError(
                f"QueryMemory: expected queries of shape {expected}, got {list(enc.shape)}; "
                "forget the session before it changes model"
            )
        memory = enc.to(torch.float32)
        if previous is not None:
            memory = self._kept * previous + memory
        return torch.nn.functional.normalize(memory, dim=-1)

    def update(self, key: str, enc: Tensor) -> Tensor:
        """Fold this turn's queries into the session's memory; arguments, result and errors as of `preview`."""
        memory = self.preview(key, enc)
        self._memories[key] = memory
        self._memories.move_to_end(key)
        if len(self._memories) > self._max_sessions:
            self._memories.popitem(last=False)
        return memory

    def get(self, key: str) -> Tensor | None:
        """The session's memory `[L, H_q, D]` float32, or None; counts as a use."""
        memory = self._memories.get(key)
        if memory is not None:
            self._memories.move_to_end(key)
        return memory

    def forget(self, key: str) -> None:
        """Drop one session; an unknown key is fine."""
        self._memories.pop(key, None)

    def clear(self) -> None:
        """Drop all sessions."""
        self._memories.clear()

    def __len__(self) -> int:
        return len(self._memories)
