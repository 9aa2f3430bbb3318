"""Prompts larger than the pool: admission asks for what a pruned session will really need.

SGLang asks for room for the whole prompt before it computes the first chunk, and refuses a prompt that the pool could
never hold. With an event after each chunk a session never holds more than `peak` live tokens at once: what is always
kept, its budget, what an event may leave over, and one chunk. That is what must fit.

Three hooks, in the order a request meets them: the length limit (`lift_length_limit`), the bound on its answer
(`bound_answer`), and the room asked for at admission and for each further chunk (`session_prefill_adder`), which also
ends chunks where an event is due (see `intentkv.keep.moments`).
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from http import HTTPStatus
from typing import TYPE_CHECKING, Any

from sglang.srt.managers.schedule_batch import FINISH_ABORT

from intentkv.apply.rows import page_floor
from intentkv.engine.cache_rows import session_of

if TYPE_CHECKING:
    from sglang.srt.managers.schedule_batch import Req
    from sglang.srt.managers.schedule_policy import PrefillAdder

    from intentkv.engine.cache import IntentKVRadixCache

RESERVED = 6  # tokens of the pool that SGLang keeps free of a prompt: one, and five for its answer


def peak_live(cache: IntentKVRadixCache, req: Req, length: int) -> int:
    """Most live tokens that `req` holds at once while its first `length` tokens are computed in chunks.

    All of them for a request that drops nothing, or nothing that frees memory.
    """
    if session_of(req) is None or cache.layout != "reclaim" or cache.peak is None:
        return length
    return min(length, cache.peak(req, length))


def lift_length_limit(info: tuple, worker: Any) -> tuple:
    """After `TpModelWorker.get_worker_info`: only the model's context limits a prompt; the pool's limit comes later."""
    longest = worker.model_config.context_len - 1
    return (*info[:4], longest, longest - 5, *info[6:])


def bound_answer(original: Callable[..., None], scheduler: Any, req: Req) -> None:
    """Around `Scheduler.init_req_max_new_tokens`: refuse what can never fit, and bound the answer by what is left.

    SGLang bounds the answer by the pool less the whole prompt, and would cut a long session's answers to nothing. A
    request that needs its whole prompt in memory is left to SGLang, but for the check that `lift_length_limit` lifted.
    """
    length, pool = len(req.origin_input_ids), scheduler.max_total_num_tokens
    wanted, least = req.sampling_params.max_new_tokens, req.sampling_params.min_new_tokens
    original(scheduler, req)
    if req.to_finish is not None:
        return
    peak = length if scheduler.chunked_prefill_size is None else peak_live(scheduler.tree_cache, req, length)
    room = pool - RESERVED - page_floor(peak + scheduler.page_size - 1, scheduler.page_size) - scheduler.page_size
    if peak >= pool - RESERVED or (peak < length and room < 1):
        req.set_finish_with_abort(
            f"The prompt has {length} tokens, of which {peak} must be in memory at once; the KV pool has {pool}. "
            "Send less, or lower intentkv_budget."
        )
    elif peak < length:
        limits = (wanted, scheduler.max_new_tokens_limit, room, scheduler.max_req_len - length - 1)
        req.sampling_params.max_new_tokens = max(0, min(limit for limit in limits if limit is not None))
        req.sampling_params.min_new_tokens = min(least, req.sampling_params.max_new_tokens)


@functools.cache
def session_prefill_adder(adder_class: Any, scheduler: Any) -> type[PrefillAdder]:
    """After `Scheduler.get_prefill_adder_class`: the same class, asking for less where less is needed."""

    class SessionPrefillAdder(adder_class):
        rem_chunk_tokens: int | None
        chunked_req_limit: int | None

        def _check_prefill_budget(self, req: Req, *, extend_input_len: int, total_tokens: int, **rest: Any) -> Any:
            if self.rem_chunk_tokens is not None and extend_input_len > self.rem_chunk_tokens:
                # The matched prefix is locked, so the pool does not count it as room: what is needed is growth.
                held = req.prefix_len - len(getattr(req.last_node, "holes", ()))
                growth = peak_live(self.tree_cache, req, len(req.full_untruncated_fill_ids)) - held
                growth = min(extend_input_len, max(growth, self.rem_chunk_tokens))
                total_tokens -= extend_input_len - growth
            fits, limit = super()._check_prefill_budget(
                req, extend_input_len=extend_input_len, total_tokens=total_tokens, **rest
            )
            return fits, self._until_event(req, limit)

        def add_one_req(self, req: Req, **rest: Any) -> Any:
            result = super().add_one_req(req, **rest)
            return self._one_chunked(req) if self.new_chunked_req is req else result

        def add_chunked_req(self, req: Req) -> Req | None:
            """The next chunk, up to the next event: as much of it as fits now; none while others must finish first.

            SGLang would go on with a full chunk in any case and stop the server when the allocation fails.
            """
            limit = self._until_event(req, self.rem_chunk_tokens)
            if limit is None:
                return super().add_chunked_req(req)
            room = page_floor(int(self.cur_rem_tokens), self.page_size) - self.page_size
            if self.rem_total_tokens <= 0 and room < limit:
                limit = room
            if limit >= self.page_size:
                self.chunked_req_limit = min(limit, self.chunked_req_limit or limit)
                rest = super().add_chunked_req(req)
            else:
                rest = req
                if not self.running_batch.reqs:
                    reason = "The session needs more memory than the KV pool has: lower intentkv_budget or send less"
                    req.discard_output_reason = FINISH_ABORT(reason, HTTPStatus.SERVICE_UNAVAILABLE)
                    scheduler._pending_chunked_abort_req = req
            if rest is not None:
                self._one_chunked(req)
            return rest

        def _until_event(self, req: Req, limit: int | None) -> int | None:
            """`limit` tokens of a prefill, cut where an event is due."""
            if limit is None or session_of(req) is None or self.tree_cache.stop is None:
                return limit
            stop = self.tree_cache.stop(req)
            return limit if stop is None else min(limit, stop - req.prefix_len)

        def _one_chunked(self, req: Req) -> Any:
            """SGLang can go on with one unfinished prompt only: what a cut chunk has left over is not given away."""
            self.rem_chunk_tokens = 0
            return self.budget_state()

    return SessionPrefillAdder
