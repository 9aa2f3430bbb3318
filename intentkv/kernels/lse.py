"""The log-sum-exp of attention, computed again where the attention that just ran did not leave it."""

import torch
import triton
import triton.language as tl

from intentkv.kernels.recover import BLOCK, chunks_of, logits_of
from intentkv.kernels.slot_lists import SlotLists, reasons_against


def log_sum_exp(query: torch.Tensor, keys: torch.Tensor, lists: SlotLists, scale: float) -> torch.Tensor:
    """`LSE[r, g] = log sum over request r's entries of exp(scale * query[r, g] . key)`, `[R, H_q]` float32.

    Exact, at the price of one more pass over the keys. -inf for a request without entries. On a GPU one program a
    request, block and KV head, and a sum over the blocks in PyTorch.

    Args:
        query, keys, lists, scale: as of `recover.recover_attention`; nothing is written to.

    Raises:
        ValueError: shapes, dtypes or devices that do not fit, with every reason.
    """
    reasons = reasons_against(query, keys, lists)
    if reasons:
        raise ValueError("\n".join(reasons))
    blocks = triton.cdiv(max(lists.lengths, default=0), BLOCK)
    if keys.is_cuda or triton.knobs.runtime.interpret:
        shape = (*query.shape[:2], max(1, blocks))
        parts = torch.full(shape, -torch.inf, dtype=torch.float32, device=query.device)
        if blocks:
            _launch(query, keys, lists, scale, parts)
        return parts.logsumexp(2)
    out = torch.full(query.shape[:2], -torch.inf, dtype=torch.float32)
    for r, span in enumerate(lists.spans()):
        for chunk in chunks_of(span, keys):
            part = logits_of(query[r], keys, lists.slots[chunk], scale).logsumexp(1).flatten()
            out[r] = torch.logaddexp(out[r], part)
    return out


def _launch(query: torch.Tensor, keys: torch.Tensor, lists: SlotLists, scale: float, parts: torch.Tensor) -> None:
    kv_heads, dim = keys.shape[1:]
    lse_kernel[(len(query), parts.shape[2], kv_heads)](
        query.contiguous(), keys, lists.slots, lists.starts, parts, scale, keys.stride(0), parts.shape[2],
        HEADS=query.shape[1], GROUP=query.shape[1] // kv_heads, DIM=dim, DIM_PAD=triton.next_power_of_2(dim), BLOCK=BLOCK,
    )  # fmt: skip


@triton.jit
def lse_kernel(
    query, keys, slots, starts, parts, scale, slot_stride, blocks,
    HEADS: tl.constexpr, GROUP: tl.constexpr, DIM: tl.constexpr, DIM_PAD: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Program (request, block, KV head): `parts[request, heads of the group, block]`, the block's share of the LSE."""
    request, block, head = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    entries = tl.load(starts + request) + block * BLOCK + tl.arange(0, BLOCK)
    end = tl.load(starts + request + 1)
    live = entries < end
    dims = tl.arange(0, DIM_PAD)
    slot = tl.load(slots + entries, mask=live, other=0)
    place = slot[:, None] * slot_stride + head * DIM + dims[None, :]
    tile = tl.load(keys + place, mask=live[:, None] & (dims < DIM)[None, :], other=0.0).to(tl.float32)
    if tl.load(starts + request) + block * BLOCK < end:
        for g in range(GROUP):
            row = request * HEADS + head * GROUP + g
            q = tl.load(query + row * DIM + dims, mask=dims < DIM, other=0.0).to(tl.float32)
            logit = tl.where(live, tl.sum(tile * q[None, :], axis=1) * scale, float("-inf"))
            peak = tl.max(logit, axis=0)
            tl.store(parts + row * blocks + block, peak + tl.log(tl.sum(tl.exp(logit - peak), axis=0)))
