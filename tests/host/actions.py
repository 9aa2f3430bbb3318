"""Requests of ActKV with real SGLang classes and a toy tokenizer; answers are written out as text."""

from __future__ import annotations

from array import array
from types import SimpleNamespace
from typing import Any

import numpy as np
from sglang.srt.layers.radix_attention import RadixAttention
from sglang.srt.managers.schedule_batch import Req
from sglang.srt.sampling.sampling_params import SamplingParams

from intentkv.config import Budget, Settings
from intentkv.engine.state import RequestState
from intentkv.observe.session import SessionKey
from intentkv.observe.spans import Spans
from intentkv.score.registry import make_scorer
from tests.host.models import Model
from tests.unit.chat_templates import ToyTokenizer


class Tokenizer(ToyTokenizer):
    """`ToyTokenizer` with the one argument of a real tokenizer's `decode` that the engine uses."""

    def __init__(self) -> None:
        super().__init__("<tool_call> </tool_call>")

    all_special_ids = (0,)

    def __len__(self) -> int:
        """Before its first text it has no words: one token, and that one special."""
        return 1

    def decode(self, ids: list[int], skip_special_tokens: bool = True) -> str:
        assert not skip_special_tokens, "markers are special tokens: they must be shown"
        return super().decode(ids)


def make_state(
    session: str,
    prompt_tokens: int,
    scorer: str = "actkv",
    budget: Budget | None = None,
    query: tuple[int, int] = (0, 0),
) -> RequestState:
    spans = Spans(system_end=0, query=query)
    return RequestState(
        key=SessionKey(session, "explicit"),
        label=session,
        scorer=scorer,
        budget=budget or Budget("fixed", 8),
        spans=spans,
        prompt=np.zeros(prompt_tokens, np.int64),
        needs=make_scorer(scorer, Settings()).needs,
    )


def make_request(rid: str, prompt: np.ndarray, state: RequestState | None) -> Req:
    params = SamplingParams(max_new_tokens=10_000, ignore_eos=True)
    params.normalize(tokenizer=None)
    req = Req(rid, "", array("q", prompt.tolist()), params, vocab_size=1 << 30)
    req.intentkv = state
    return req


def say(req: Any, tokenizer: Tokenizer, text: str) -> int:
    """Append `text` to the answer; returns how many tokens it is."""
    ids = tokenizer.encode(text)
    req.output_ids.extend(ids)
    return len(ids)


def with_identity(batch: Any, rids: list[str]) -> Any:
    """A forward batch of `tests.kernels.host` with what the observers read beside it."""
    batch.rids, batch.seq_lens_cpu, batch.intentkv_rows = rids, batch.seq_lens.clone(), batch.req_pool_indices
    return batch


def scheduler_of(cache: Any, tokenizer: Tokenizer, layers: int = 1) -> SimpleNamespace:
    """What `Runtime` reads of SGLang's scheduler, around a real cache with its pools."""
    attention = RadixAttention(num_heads=1, head_dim=4, scaling=1.0, num_kv_heads=1, layer_id=0)
    runner = SimpleNamespace(
        model=Model(attention),
        model_config=SimpleNamespace(num_hidden_layers=layers),
        attn_backend=SimpleNamespace(views=None),
        sampling_observer=None,
    )
    return SimpleNamespace(
        tp_worker=SimpleNamespace(model_runner=runner),
        tree_cache=cache,
        tokenizer=tokenizer,
        server_args=SimpleNamespace(chat_template=None),
        req_to_token_pool=cache.req_to_token_pool,
        token_to_kv_pool_allocator=cache.token_to_kv_pool_allocator,
        page_size=cache.page_size,
        chunked_prefill_size=None,
    )
