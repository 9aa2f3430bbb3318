"""The few attributes of SGLang's schedule batch that its allocation functions read."""

from __future__ import annotations

from types import SimpleNamespace
from typing import TYPE_CHECKING

import torch
from sglang.srt.managers.schedule_batch import Req

if TYPE_CHECKING:
    from tests.host.world import World


def extend_batch(world: World, req: Req) -> SimpleNamespace:
    """One request about to compute `[prefix_len, extend_end)`."""
    return _batch(
        world,
        [req],
        torch.tensor([req.extend_end]),
        prefix_lens=[req.prefix_len],
        extend_lens=[req.extend_len],
        extend_num_tokens=req.extend_len,
        hisparse_coordinator=None,
        is_dllm=lambda: False,
    )


def decode_batch(world: World, reqs: list[Req]) -> SimpleNamespace:
    """Requests about to compute their newest token."""
    rows = torch.tensor([req.kv.req_pool_idx for req in reqs])
    return _batch(
        world,
        reqs,
        torch.tensor([req.kv.kv_committed_len for req in reqs]),
        req_pool_indices=rows,
        req_pool_indices_cpu=rows,
        model_config=SimpleNamespace(is_encoder_decoder=False),
    )


def _batch(world: World, reqs: list[Req], lengths: torch.Tensor, **rest: object) -> SimpleNamespace:
    return SimpleNamespace(
        reqs=reqs,
        seq_lens=lengths,
        seq_lens_cpu=lengths,
        device="cpu",
        tree_cache=world.cache,
        req_to_token_pool=world.pool,
        maybe_evict_swa=lambda: None,
        **rest,
    )
