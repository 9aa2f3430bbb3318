"""Attention scores out of the log-sum-exp that paged attention left: `A_j = exp(s_j - LSE)` (ActKV, Algorithm 3).

Only the logits of one query a request are computed again, against keys that are read where they lie. No softmax, no
gathered copy of the keys, no stored queries.
"""

import torch
import triton
import triton.language as tl

from intentkv.kernels.slot_lists import SlotLists, reasons_against

BLOCK = 16  # entries a program; a tile of 16 x 256 float32 keys stays in registers on every GPU generation
_CHUNK_BYTES = 4 * 2**20  # of keys in float32, on the torch path


def recover_attention(
    query: torch.Tensor, keys: torch.Tensor, lists: SlotLists, lse: torch.Tensor, scale: float, out: torch.Tensor
) -> None:
    """Add to `out` the attention that each request's query pays to each of its entries, the most of its group's heads.

    `out[h, i] += max over the query heads g of KV head h of exp(scale * query[r, g] . keys[slots[i], h] - lse[r, g])`
    for the entries i of request r. Called for every layer and token of an action region, `out` divided by the number
    of calls is the running mean of the paper. On a GPU one program a request, block of 16 entries and KV head.

    Args:
        query: `[R, H_q, D]`, any float dtype: the query of the token just decoded; query head `g` reads KV head
            `g // (H_q // H_kv)`.
        keys: `[S, H_kv, D]`, any float dtype: the pool of one layer, read only.
        lists: the requests' slots, each below S.
        lse: `[R, H_q]` float32, natural log-sum-exp of the scaled logits over exactly these slots: from the attention
            that just ran, or `log_sum_exp`.
        scale: factor on the logits, usually `D ** -0.5`.
        out: `[H_kv, N]` float32 contiguous, N entries in all; added to. Nothing else is written.

    Raises:
        ValueError: shapes, dtypes or devices that do not fit, with every reason.
    """
    reasons = reasons_against(query, keys, lists)
    if lse.shape != query.shape[:2] or lse.dtype != torch.float32:
        reasons.append(f"expected an LSE of float32 {list(query.shape[:2])}, got {lse.dtype} {list(lse.shape)}")
    expected = (keys.shape[1], len(lists.slots)) if keys.dim() == 3 else None
    if out.shape != expected or out.dtype != torch.float32 or not out.is_contiguous():
        reasons.append(f"expected out contiguous float32 {list(expected or ())}, got {out.dtype} {list(out.shape)}")
    if reasons:
        raise ValueError("\n".join(reasons))
    if not lists.slots.numel():
        return
    if keys.is_cuda or triton.knobs.runtime.interpret:
        _launch(query, keys, lists, lse, scale, out)
    else:
        _recover_torch(query, keys, lists, lse, scale, out)


def chunks_of(span: slice, keys: torch.Tensor) -> list[slice]:
    """A request's entries in pieces whose keys stay within the workspace."""
    step = max(1, _CHUNK_BYTES // (4 * keys.shape[1] * keys.shape[2]))
    return [slice(start, min(start + step, span.stop)) for start in range(span.start, span.stop, step)]


def logits_of(query: torch.Tensor, keys: torch.Tensor, slots: torch.Tensor, scale: float) -> torch.Tensor:
    """`[H_kv, c, G]` float32: one request's query `[H_q, D]` against the keys of `slots` `[c]`."""
    kv_heads, dim = keys.shape[1:]
    grouped = query.float().view(kv_heads, -1, dim).transpose(1, 2)
    return torch.bmm(keys.index_select(0, slots).float().transpose(0, 1), grouped).mul_(scale)


def _recover_torch(
    query: torch.Tensor, keys: torch.Tensor, lists: SlotLists, lse: torch.Tensor, scale: float, out: torch.Tensor
) -> None:
    for r, span in enumerate(lists.spans()):
        peak = lse[r].view(keys.shape[1], 1, -1)
        for chunk in chunks_of(span, keys):
            logits = logits_of(query[r], keys, lists.slots[chunk], scale)
            out[:, chunk] += logits.sub_(peak).exp_().amax(2)


def _launch(
    query: torch.Tensor, keys: torch.Tensor, lists: SlotLists, lse: torch.Tensor, scale: float, out: torch.Tensor
) -> None:
    kv_heads, dim = keys.shape[1:]
    query, lse = query.contiguous(), lse.contiguous()
    grid = (len(query), triton.cdiv(max(lists.lengths), BLOCK), kv_heads)
    recover_kernel[grid](
        query, keys, lists.slots, lists.starts, lse, out, scale, keys.stride(0), out.stride(0),
        HEADS=query.shape[1], GROUP=query.shape[1] // kv_heads, DIM=dim, DIM_PAD=triton.next_power_of_2(dim), BLOCK=BLOCK,
    )  # fmt: skip


@triton.jit
def recover_kernel(
    query, keys, slots, starts, lse, out, scale, slot_stride, out_stride,
    HEADS: tl.constexpr, GROUP: tl.constexpr, DIM: tl.constexpr, DIM_PAD: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Program (request, block, KV head): `out[head, block's entries] += max over the group of exp(logit - lse)`."""
    request, block, head = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    start = tl.load(starts + request)
    entries = start + block * BLOCK + tl.arange(0, BLOCK)
    live = entries < tl.load(starts + request + 1)
    dims = tl.arange(0, DIM_PAD)
    slot = tl.load(slots + entries, mask=live, other=0)
    place = slot[:, None] * slot_stride + head * DIM + dims[None, :]
    tile = tl.load(keys + place, mask=live[:, None] & (dims < DIM)[None, :], other=0.0).to(tl.float32)
    best = tl.zeros([BLOCK], dtype=tl.float32)
    for g in range(GROUP):
        row = request * HEADS + head * GROUP + g
        q = tl.load(query + row * DIM + dims, mask=dims < DIM, other=0.0).to(tl.float32)
        logit = tl.sum(tile * q[None, :], axis=1) * scale
        best = tl.maximum(best, tl.exp(logit - tl.load(lse + row)))
    to = out + head * out_stride + entries
    tl.store(to, tl.load(to, mask=live, other=0.0) + best, mask=live)
