"""A `World` whose requests belong to sessions that the real runtime looks at, with a toy model that reads what its rows show.

The toy's state of a token is a function of the token and of all states that its row lists, as in attention; the next
token is a chaotic function of the state. So answers differ as soon as anything read differs.
"""

from __future__ import annotations

import random
from types import SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np
import torch
from sglang.srt.layers.radix_attention import RadixAttention
from sglang.srt.managers.schedule_batch import Req
from sglang.srt.managers.schedule_policy import PrefillAdder
from sglang.srt.mem_cache.allocation import alloc_for_extend
from sglang.srt.mem_cache.common import checkpoint_kv_cache, release_kv_cache
from sglang.srt.model_executor.forward_batch_info import ForwardMode

from intentkv.apply.rows import merge
from intentkv.config import Budget, Settings
from intentkv.engine import runtime
from intentkv.engine.observer import computed, plan_forward
from intentkv.engine.requests import apply_while_decoding, take_back_event
from intentkv.engine.runtime import Runtime
from intentkv.engine.state import RequestState
from intentkv.observe.session import SessionKey
from intentkv.observe.spans import Spans
from tests.host.batches import extend_batch
from tests.host.models import Model, small_tokenizer
from tests.host.world import World

WIDTH = 8
SCORER = "intent-rescaled"  # reads the keys: what differs anywhere differs in its scores
VOCABULARY = 997


class SessionWorld(World):
    """One scheduler whose habits are drawn from `habits`: who shares its chunks, what it launches ahead, whom it retracts.

    With `habits` None it is the simplest one: full chunks, one step at a time, no retraction.
    """

    def __init__(
        self,
        *args: Any,
        budget: int,
        trigger: int,
        scorer: str = SCORER,
        habits: random.Random | None = None,
        max_sessions: int = 1024,
        **options: Any,
    ) -> None:
        super().__init__(*args, **options)
        self.habits = habits
        self.states = torch.zeros(self.size + self.page_size, WIDTH, dtype=torch.float64)
        draw = torch.Generator().manual_seed(1)
        self.words = torch.randn(VOCABULARY, WIDTH, generator=draw, dtype=torch.float64)
        self.mix = torch.randn(WIDTH, WIDTH, generator=draw, dtype=torch.float64)
        self.ahead: dict[str, list[int]] = {}  # by request: tokens of steps whose result was not processed yet
        self.retractions = 0
        self.budget, self.scorer = budget, scorer
        keys = SimpleNamespace(get_key_buffer=lambda layer: self.states.float().unsqueeze(1))
        layer = RadixAttention(num_heads=1, head_dim=WIDTH, scaling=1.0, num_kv_heads=1, layer_id=0)
        runner = SimpleNamespace(
            model=Model(layer),
            model_config=SimpleNamespace(num_hidden_layers=1),
            attn_backend=SimpleNamespace(views=None),
            sampling_observer=None,
        )
        self.runtime = Runtime(
            Settings(scorer=scorer, trigger=trigger, recent=8, max_sessions=max_sessions),
            SimpleNamespace(
                tp_worker=SimpleNamespace(model_runner=runner),
                tree_cache=self.cache,
                tokenizer=small_tokenizer(),
                server_args=SimpleNamespace(chat_template=None),
                req_to_token_pool=self.pool,
                token_to_kv_pool_allocator=SimpleNamespace(get_kvcache=lambda: keys),
                page_size=self.page_size,
                chunked_prefill_size=self.chunk,
            ),
        )

        self.move_contents()

    def move(self, sources: np.ndarray, destinations: np.ndarray) -> None:
        super().move(sources, destinations)
        self.states[destinations] = self.states[sources]

    def ask(self, session: str, history: list[int], message: list[int], new: int) -> Req:
        """A turn: `history`, whose first 4 tokens are the system prompt, and the newest message."""
        prompt = history + message
        req = self.request(prompt, new=new)
        spans = Spans(system_end=4, query=(len(history), len(prompt)))
        req.intentkv = RequestState(
            key=SessionKey(session, "explicit"),
            label=session,
            scorer=self.scorer,
            budget=Budget("fixed", self.budget),
            spans=spans,
            prompt=np.array(prompt),
            needs=self.runtime.scoring.needs(self.scorer),
        )
        return req

    def serve(self, req: Req) -> Req:
        """One request from beginning to end, in this scheduler's habits."""
        while not req.finished():
            if req in self.prefilling:
                self.next_chunk(req)
            elif req in self.running:
                self.decode([req])
                if not req.finished() and self._now_and_then():
                    self.retract(req)
            elif not self.admit(req):
                raise RuntimeError(f"{req.rid} was not admitted")
        return req

    def _now_and_then(self) -> bool:
        return self.habits is not None and self.habits.random() < 0.25

    def _adder(self) -> PrefillAdder:
        """Others may have taken a part of this round's chunk."""
        adder = super()._adder()
        if self.habits is not None:
            pages = self.chunk // self.page_size
            adder.rem_chunk_tokens = self.page_size * self.habits.randint(1, pages)
        return adder

    def _extend(self, req: Req) -> None:
        req.is_retracted = False  # as SGLang does when it prepares the batch
        alloc_for_extend(extend_batch(self, req))
        self.compute(req, req.prefix_len, req.extend_end)
        if req.extend_end < len(req.full_untruncated_fill_ids):
            self.prefilling.append(req)
            return
        self.running.append(req)
        if (
            self._now_and_then()
        ):  # the next step is launched, or the request retracted, before the prompt's result is seen
            self._step([req])
        if self._now_and_then():
            self.retract(req)
            return
        self._land([req])

    def decode(self, reqs: list[Req]) -> list[Req]:
        (req,) = reqs
        while len(self.ahead[req.rid]) < 1 + self._now_and_then():
            self._step([req])
        self._land([req])
        return []

    def _land(self, reqs: list[Req]) -> None:
        (req,) = reqs
        self.allocator.free_group_begin()
        first = req.extend_end == len(req.origin_input_ids + req.output_ids)
        req.output_ids.append(self.ahead[req.rid].pop(0))
        req.update_finish_state()
        if req.finished():
            release_kv_cache(req, self.cache, checkpoint=True)
        elif first:
            checkpoint_kv_cache(req, self.cache)
        self.allocator.free_group_end()
        if not first:
            with mock.patch.object(runtime, "_runtime", self.runtime):
                apply_while_decoding(None, self, SimpleNamespace(reqs=reqs), None)
        self.running = [other for other in self.running if not other.finished()]

    def retract(self, req: Req) -> None:
        self.retractions += 1
        self.ahead[req.rid] = []
        super().retract(req)
        take_back_event(None, req)

    # -- the toy model

    def hidden_from(self, req: Req, start: int) -> np.ndarray:
        """What the row does not show to tokens from `start` on, and what an event has hidden before its checkpoint."""
        holes, pending = self.holes_of(req), req.intentkv.pending
        return holes if pending is None or start < pending.length else merge(holes, pending.drop)

    def compute(self, req: Req, start: int, end: int) -> None:
        fed = list(req.origin_input_ids + req.output_ids) + self.ahead.setdefault(req.rid, [])
        self.check_text_of(req, fed, start, end)
        row = req.kv.req_pool_idx
        slots = self.pool.req_to_token[row]
        read = self.states[self.cache.views.slots(row, start)]
        total, count = read.sum(0), len(read)
        for position in range(start, end):
            told = (total / max(1, count)) @ self.mix
            state = torch.tanh(self.words[fed[position]] + told)
            self.states[slots[position]] = state
            total, count = total + state, count + 1
        if end == len(fed):
            self.ahead[req.rid].append(int(abs(state.sum()) * 1e4) % VOCABULARY)
        self._look(req, row, start, end, self.states[slots[start:end].long()].float().unsqueeze(1))

    def _look(self, req: Req, row: int, start: int, end: int, queries: torch.Tensor) -> None:
        state = req.intentkv
        prefill = end <= req.extend_end
        if not prefill:
            if end >= state.look:
                self.runtime.look(state, row, end)
            return
        batch = SimpleNamespace(
            forward_mode=ForwardMode.EXTEND,
            rids=[req.rid],
            intentkv_rows=torch.tensor([row]),
            extend_prefix_lens_cpu=[start],
            extend_seq_lens_cpu=[end - start],
        )
        plan = plan_forward(batch, {req.rid: state}, computed(batch))
        assert plan is not None
        plan.feed(0, queries)
        self.runtime.look(state, row, end)

    def check_text_of(self, req: Req, fed: list[int], start: int, end: int) -> None:
        """The row reads its own text, and no KV computed behind holes that it does not have (see `contents`)."""
        holes = self.hidden_from(req, start)
        live = np.ones(start, dtype=bool)
        live[holes[holes < start]] = False
        slots = self.row(req, end)
        assert (slots[:start][live] >= self.page_size).all()
        self.contents.check(slots[:start][live], fed, np.flatnonzero(live), holes)
        self.contents.write(slots[start:], fed[:end], start, holes)
