"""A scheduler in small: SGLang's own cache, pools, allocators, requests and admission, and no model."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterable
from types import SimpleNamespace

import numpy as np
from sglang.srt.managers.schedule_batch import FINISH_ABORT, Req
from sglang.srt.managers.schedule_policy import PrefillAdder
from sglang.srt.mem_cache.allocation import alloc_for_decode_default, alloc_for_extend
from sglang.srt.mem_cache.common import checkpoint_kv_cache, evict_from_tree_cache, release_kv_cache
from sglang.srt.mem_cache.unified_radix_cache import UnifiedRadixCache
from sglang.srt.sampling.sampling_params import SamplingParams

from intentkv.apply.live_view import LiveViews
from intentkv.apply.rows import NO_POSITIONS
from intentkv.engine.admission import session_prefill_adder
from intentkv.engine.cache import IntentKVRadixCache
from tests.host.batches import decode_batch, extend_batch
from tests.host.contents import Contents, text_hashes
from tests.host.pools import build_cache


class Scheduler:
    """What our admission tells the scheduler."""

    _pending_chunked_abort_req: Req | None = None


class World:
    """One pool, one cache, and the steps a scheduler takes with them.

    Attributes:
        decide: what the cache asks for positions to drop; tests replace it.
        running: requests that decode; `prefilling`: requests between two chunks.
    """

    def __init__(
        self,
        core: str = "rust",
        page_size: int = 1,
        size: int = 1024,
        *,
        cache_class: type[UnifiedRadixCache] = IntentKVRadixCache,
        layout: str = "reclaim",
        chunk: int = 1 << 20,
        context: int = 4096,
        max_requests: int = 32,
        need_sort: bool = False,
    ) -> None:
        self.page_size, self.size, self.chunk = page_size, size, chunk
        self.cache = build_cache(cache_class, core, page_size, size, context, max_requests, need_sort)
        self.pool, self.allocator = self.cache.req_to_token_pool, self.cache.token_to_kv_pool_allocator
        self.decide: Callable[[Req, int], np.ndarray] = lambda req, length: NO_POSITIONS
        self.ours = isinstance(self.cache, IntentKVRadixCache)
        if self.ours:
            self.cache.layout = layout
            self.cache.views = LiveViews(self.pool.req_to_token)
            self.cache.decide = lambda req, length: self.decide(req, length)
            self.move_contents()
        self.contents = Contents(size + page_size)
        self.scheduler = Scheduler()
        self.adder_class = session_prefill_adder(PrefillAdder, self.scheduler) if self.ours else PrefillAdder
        self.running: list[Req] = []
        self.prefilling: list[Req] = []
        self.requests = 0
        self.found: dict[str, int] = {}  # by request: length of the prefix that it was admitted with last

    # -- requests

    def request(
        self,
        tokens: Iterable[int],
        session: str | None = None,
        new: int = 4,
        extra_key: str | None = None,
        salt: str | None = None,
    ) -> Req:
        """A request as the tokenizer would send it; nothing is allocated yet."""
        self.requests += 1
        params = SamplingParams(max_new_tokens=new, ignore_eos=True)
        params.normalize(tokenizer=None)
        req = Req(
            f"r{self.requests}",
            "",
            array("q", tokens),
            params,
            extra_key=extra_key,
            cache_salt=salt,
            vocab_size=1 << 30,
        )
        if session is not None:
            req.intentkv = SimpleNamespace(
                session=session, holes=NO_POSITIONS, dropped=0, freed=0, reused_prefix_tokens=0
            )
        return req

    def serve(self, req: Req) -> Req:
        """Prefill and decode one request to its end."""
        if not self.admit(req):
            raise RuntimeError(f"{req.rid} of {len(req.origin_input_ids)} tokens was not admitted")
        while req in self.prefilling:
            self.next_chunk(req)
        while req in self.running:
            self.decode([req])
        return req

    def admit(self, req: Req) -> bool:
        """Match, admit and compute the first chunk; False when the pool has no room or no row."""
        if not self.pool.available_size():
            return False
        req.init_next_round_input(self.cache)
        adder = self._adder()
        adder.add_one_req(req, has_chunked_req=False, truncation_align_size=None)
        if not adder.can_run_list:
            return False
        self.found[req.rid] = req.prefix_len
        self._extend(req)
        return True

    def next_chunk(self, req: Req) -> None:
        """Publish the chunk computed last and compute the next, or as much of it as fits; abort it if it never will."""
        if req.extend_end > req.prefix_len:
            checkpoint_kv_cache(req, self.cache)
        req.init_next_round_input()
        adder = self._adder()
        adder.add_chunked_req(req)
        if self.scheduler._pending_chunked_abort_req is req:
            self.abort(req)
        elif adder.can_run_list:
            self.prefilling.remove(req)
            self._extend(req)

    def _adder(self) -> PrefillAdder:
        batch = SimpleNamespace(reqs=self.running)
        chunk = self.chunk // self.page_size * self.page_size
        return self.adder_class(self.page_size, self.cache, self.allocator, batch, 0.5, 1 << 30, chunk)

    def _extend(self, req: Req) -> None:
        alloc_for_extend(extend_batch(self, req))
        self.compute(req, req.prefix_len, req.extend_end)
        if req.extend_end < len(req.full_untruncated_fill_ids):
            self.prefilling.append(req)
            return
        self._land([req])
        if not req.finished():
            self.running.append(req)

    def _land(self, reqs: list[Req]) -> None:
        """Process a batch's results as the scheduler does, inside one free group."""
        self.allocator.free_group_begin()
        for req in reqs:
            first = req not in self.running
            req.output_ids.append(self.next_token(req))
            req.update_finish_state()
            if req.finished():
                release_kv_cache(req, self.cache, checkpoint=True)
            elif first:
                checkpoint_kv_cache(req, self.cache)
        self.allocator.free_group_end()
        self.running = [req for req in self.running if not req.finished()]

    def next_token(self, req: Req) -> int:
        """What the model says next: anything that follows from the text alone."""
        return int(text_hashes(req.origin_input_ids + req.output_ids)[-1] % np.uint64(7))

    def decode(self, reqs: list[Req]) -> list[Req]:
        """One decode step; requests that no longer fit are retracted first and returned."""
        retracted = []
        while not self._decode_fits(reqs):
            retracted.append(reqs[-1])
            self.retract(reqs[-1])
            reqs = reqs[:-1]
        if reqs:
            self._step(reqs)
            self._land(reqs)
        return retracted

    def _step(self, reqs: list[Req]) -> None:
        alloc_for_decode_default(decode_batch(self, reqs), 1)
        for req in reqs:
            self.compute(req, req.kv.kv_committed_len - 1, req.kv.kv_committed_len)

    def overshoot(self, req: Req) -> None:
        """Run the step that an overlapped scheduler has launched before it learns that the request has finished."""
        self._step([req])

    def _decode_fits(self, reqs: list[Req]) -> bool:
        pages = sum(req.kv.kv_committed_len % self.page_size == 0 for req in reqs)
        return self.allocator.check_decode_capacity(num_tokens=pages * self.page_size, tree_cache=self.cache)

    def retract(self, req: Req) -> None:
        """Take a decoding request's memory; it must be admitted again."""
        self.running.remove(req)
        release_kv_cache(req, self.cache, checkpoint=False)
        evict_from_tree_cache(self.cache, self.page_size)
        req.reset_for_retract()

    def abort(self, req: Req) -> None:
        """The client has gone away."""
        if req in self.prefilling:
            self.prefilling.remove(req)
            req.finished_reason = FINISH_ABORT("gone")
            release_kv_cache(req, self.cache, checkpoint=False)
            return
        self.allocator.free_group_begin()
        self.running.remove(req)
        req.to_finish = FINISH_ABORT("gone")
        req.update_finish_state()
        release_kv_cache(req, self.cache, checkpoint=True)
        self.allocator.free_group_end()

    def evict(self, tokens: int) -> None:
        evict_from_tree_cache(self.cache, tokens)

    def flush(self) -> None:
        """Forget everything, as an idle server does on request."""
        self.cache.reset()
        self.pool.clear()
        self.allocator.clear()

    # -- rows and what they read

    def move_contents(self) -> None:
        """Let the cache move what slots stand for here; a runtime would move keys and values."""
        self.cache.move = lambda *slots: self.move(*(each.numpy() for each in slots))

    def move(self, sources: np.ndarray, destinations: np.ndarray) -> None:
        self.contents.move(sources, destinations)

    def holes_of(self, req: Req) -> np.ndarray:
        row = self.cache.rows.get(req.kv.req_pool_idx) if self.ours else None
        return NO_POSITIONS if row is None else row.holes

    def row(self, req: Req, length: int) -> np.ndarray:
        return self.pool.req_to_token[req.kv.req_pool_idx, :length].numpy()

    def compute(self, req: Req, start: int, end: int) -> None:
        """A forward pass over positions `[start, end)` of a request: it reads its row and writes the new tokens' KV."""
        self.check_row(req, start)
        slots = self.row(req, end)[start:]
        assert (slots >= self.page_size).all(), f"{req.rid} writes KV to the dead page"
        self.contents.write(slots, (req.origin_input_ids + req.output_ids)[:end], start, self.holes_of(req))

    def check_row(self, req: Req, length: int) -> None:
        """Every live slot of a row holds KV of the row's text, computed behind no hole that the row does not have."""
        holes = self.holes_of(req)
        live = np.ones(length, dtype=bool)
        live[holes] = False
        slots = self.row(req, length)[live]
        self.contents.check(slots, req.origin_input_ids + req.output_ids, np.flatnonzero(live), holes)
