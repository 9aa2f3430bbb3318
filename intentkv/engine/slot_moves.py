"""Moving slots: all that is kept by slot goes along, behind every forward that was launched before.

An event packs a session's survivors while the next step may run already: that step reads the row as it stood when it was
launched, and its keys until its last layer. On a GPU it runs on a stream of its own, and SGLang orders only the row behind
it. So the copies, and the writes to the row that follow them, wait for that stream, on the device; SGLang in turn lets the
next forward wait for this one. The host waits for nothing.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from intentkv.kernels.compact import copy_slots

if TYPE_CHECKING:
    from intentkv.engine.scoring import Scoring


def behind_forwards(scheduler: Any, on: Tensor) -> None:
    """Let what is queued next wait for every forward that was launched before, if `on` is on a GPU; the host goes on."""
    if on.is_cuda:
        torch.cuda.current_stream(on.device).wait_stream(scheduler.forward_stream)


class SlotMoves:
    """What the cache calls to move slots of one scheduler's KV pool.

    Args:
        scheduler: SGLang's; gives the pool, the number of layers and the stream that forwards run on.
        scoring: gives what is kept by slot beside keys and values.
    """

    def __init__(self, scheduler: Any, scoring: Scoring) -> None:
        self._scheduler, self._scoring = scheduler, scoring
        self._pool = scheduler.token_to_kv_pool_allocator.get_kvcache()
        self._layers: int = scheduler.tp_worker.model_runner.model_config.num_hidden_layers

    def __call__(self, sources: Tensor, destinations: Tensor) -> None:
        """Copy slots `sources` to `destinations`, `[n]` int64 each on the pool's device; none is in both."""
        behind_forwards(self._scheduler, sources)
        for layer in range(self._layers):
            copy_slots(self._pool.get_key_buffer(layer), self._pool.get_value_buffer(layer), sources, destinations)
        for values in self._scoring.by_slot():
            values[destinations] = values[sources]
