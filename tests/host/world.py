"""A scheduler in small: SGLang's own cache, pools, allocators, requests and admission, and no model.

In place of keys and values, every slot holds what its token's KV would depend on: its text up to the token, and the holes it was
computed behind. A row that reads an overwritten slot, another session's slot, or KV computed behind holes it does not have, is
seen at once.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterable
from types import SimpleNamespace

import numpy as np
import torch
from sglang.srt.managers.schedule_batch import FINISH_ABORT, Req
from sglang.srt.managers.schedule_policy import PrefillAdder
from sglang.srt.mem_cache.allocation import alloc_for_decode_default, alloc_for_extend
from sglang.srt.mem_cache.allocator.paged import PagedTokenToKVPoolAllocator
from sglang.srt.mem_cache.allocator.token import TokenToKVPoolAllocator
from sglang.srt.mem_cache.cache_init_params import CacheInitParams
from sglang.srt.mem_cache.common import checkpoint_kv_cache, evict_from_tree_cache, release_kv_cache
from sglang.srt.mem_cache.memory_pool import ReqToTokenPool
from sglang.srt.mem_cache.unified_cache.component_type import ComponentType
from sglang.srt.mem_cache.unified_radix_cache import UnifiedRadixCache
from sglang.srt.runtime_context import get_context
from sglang.srt.sampling.sampling_params import SamplingParams

from intentkv.apply.live_view import LiveViews
from intentkv.apply.rows import NO_POSITIONS
from intentkv.engine.cache import IntentKVRadixCache


def publish_settings() -> None:
    """Give SGLang the process-wide settings its host classes read."""
    get_context().override_server_args(attention_backend="torch_native", device="cpu").install()


def text_hashes(tokens: Iterable[int]) -> np.ndarray:
    """One number for each beginning of a text, `[length]` uint64."""
    ids = np.array(tokens, dtype=np.uint64) + np.uint64(1)
    weights = np.cumprod(np.full(len(ids), 0x9E3779B97F4A7C15, dtype=np.uint64))
    return np.cumsum(ids * weights, dtype=np.uint64)


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
        self.pool = ReqToTokenPool(max_requests, context, "cpu", False)
        if page_size == 1:
            self.allocator = TokenToKVPoolAllocator(size, torch.bfloat16, "cpu", None, need_sort)
        else:
            self.allocator = PagedTokenToKVPoolAllocator(size, page_size, torch.bfloat16, "cpu", None, need_sort)
        self.cache = cache_class(
            CacheInitParams(
                disable=False,
                req_to_token_pool=self.pool,
                token_to_kv_pool_allocator=self.allocator,
                page_size=page_size,
                tree_components=(ComponentType.FULL,),
                tree_core_backend=core,
            )
        )
        self.decide: Callable[[Req, int], np.ndarray] = lambda req, length: NO_POSITIONS
        self.ours = isinstance(self.cache, IntentKVRadixCache)
        if self.ours:
            self.cache.layout = layout
            self.cache.views = LiveViews(self.pool.req_to_token)
            self.cache.decide = lambda req, length: self.decide(req, length)
        self.text = np.zeros(size + page_size, dtype=np.uint64)  # by slot: the text its KV stands for
        self.behind = np.zeros(size + page_size, dtype=np.int64)  # by slot: index into `hole_sets`
        self.hole_sets: list[np.ndarray] = [NO_POSITIONS]
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

    def admit_chunk(self, req: Req) -> None:
        """Compute the first chunk of a prompt that admission would find too large for the pool."""
        req.init_next_round_input(self.cache)
        req.lock = self.cache.lock(req.last_node)
        req.extend_end = min(req.prefix_len + self.chunk, len(req.full_untruncated_fill_ids))
        self.found[req.rid] = req.prefix_len
        self._extend(req)

    def next_chunk(self, req: Req) -> None:
        """Publish the chunk computed last and compute the next one."""
        checkpoint_kv_cache(req, self.cache)
        self.prefilling.remove(req)
        req.init_next_round_input()
        self._adder().add_chunked_req(req)
        self._extend(req)

    def _adder(self) -> PrefillAdder:
        batch = SimpleNamespace(reqs=self.running)
        chunk = self.chunk // self.page_size * self.page_size
        return PrefillAdder(self.page_size, self.cache, self.allocator, batch, 0.5, 1 << 30, chunk)

    def _extend(self, req: Req) -> None:
        lengths = torch.tensor([req.extend_end])
        batch = SimpleNamespace(
            reqs=[req],
            prefix_lens=[req.prefix_len],
            extend_lens=[req.extend_len],
            extend_num_tokens=req.extend_len,
            seq_lens=lengths,
            seq_lens_cpu=lengths,
            device="cpu",
            tree_cache=self.cache,
            req_to_token_pool=self.pool,
            hisparse_coordinator=None,
            maybe_evict_swa=lambda: None,
            is_dllm=lambda: False,
        )
        alloc_for_extend(batch)
        self.check_row(req, req.prefix_len)
        self._compute(req, req.prefix_len, req.extend_end)
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
            self._allocate_step(reqs)
            for req in reqs:
                self.check_row(req, req.kv.kv_committed_len - 1)
                self._compute(req, req.kv.kv_committed_len - 1, req.kv.kv_committed_len)
            self._land(reqs)
        return retracted

    def _allocate_step(self, reqs: list[Req]) -> None:
        lengths = torch.tensor([req.kv.kv_committed_len for req in reqs])
        rows = torch.tensor([req.kv.req_pool_idx for req in reqs])
        batch = SimpleNamespace(
            reqs=reqs,
            seq_lens=lengths,
            seq_lens_cpu=lengths,
            req_pool_indices=rows,
            req_pool_indices_cpu=rows,
            device="cpu",
            tree_cache=self.cache,
            req_to_token_pool=self.pool,
            maybe_evict_swa=lambda: None,
            model_config=SimpleNamespace(is_encoder_decoder=False),
        )
        alloc_for_decode_default(batch, 1)

    def overshoot(self, req: Req) -> None:
        """Run the step that an overlapped scheduler has launched before it learns that the request has finished."""
        self._allocate_step([req])
        self._compute(req, req.kv.kv_committed_len - 1, req.kv.kv_committed_len)

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

    # -- the stand-in for keys and values

    def holes_of(self, req: Req) -> np.ndarray:
        row = self.cache.rows.get(req.kv.req_pool_idx) if self.ours else None
        return NO_POSITIONS if row is None else row.holes

    def row(self, req: Req, length: int) -> np.ndarray:
        return self.pool.req_to_token[req.kv.req_pool_idx, :length].numpy()

    def _compute(self, req: Req, start: int, end: int) -> None:
        slots = self.row(req, end)[start:]
        assert (slots >= self.page_size).all(), f"{req.rid} writes KV to the dead page"
        self.text[slots] = text_hashes((req.origin_input_ids + req.output_ids)[:end])[start:]
        holes = self.holes_of(req)
        if not np.array_equal(self.hole_sets[-1], holes):
            self.hole_sets.append(holes)
        self.behind[slots] = len(self.hole_sets) - 1 if len(holes) else 0

    def check_row(self, req: Req, length: int) -> None:
        """Every live slot of a row holds KV of the row's text, computed behind no hole that the row does not have."""
        holes = self.holes_of(req)
        live = np.ones(length, dtype=bool)
        live[holes] = False
        self.check_slots(
            self.row(req, length)[live], req.origin_input_ids + req.output_ids, np.flatnonzero(live), holes
        )

    def check_slots(self, slots: np.ndarray, tokens: Iterable[int], positions: np.ndarray, holes: np.ndarray) -> None:
        wrong = self.text[slots] != text_hashes(tokens)[positions]
        assert not wrong.any(), f"position {positions[wrong][0]} reads KV of another text"
        for index in np.unique(self.behind[slots]):
            foreign = np.setdiff1d(self.hole_sets[index], holes)
            assert not len(foreign), f"KV computed behind a hole at {foreign[0]} is read by a row without it"
