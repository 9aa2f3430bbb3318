"""The rule score over paged keys: how one query a head shares its attention among the tokens of a history, summed over heads.

Keys are read where they lie, by slot; the query heads of a group share the keys of their KV head, without a copy for each.
"""

import math
from collections.abc import Iterator

import torch
import triton
import triton.language as tl
from torch import Tensor

from intentkv.kernels.chunks import chunks

BLOCK = 16  # entries a program looks at together; a tile of 16 x 256 float32 keys stays in registers on every GPU generation
SPLITS = (
    128  # programs that share the first pass over a KV head: with 8 of those, enough for any GPU; bounds the workspace
)


def add_rule_score(queries: Tensor, keys: Tensor, slots: Tensor, out: Tensor) -> None:
    """Add one layer's rule score to `out`: `out[j] += sum over h of softmax over j of (queries[h] . keys[slots[j], h // G])`.

    IntentKV, rule score; called for every layer with what its query memory holds, divided by the temperature. The keys are
    read twice, for the softmax's peak and mass and then for the shares; on a CPU once, where the history is one chunk. On a
    GPU both passes are one launch; the first has a program for `SPLITS` parts of the history and each KV head, the second
    one for every `BLOCK` entries, which adds up all heads in a fixed order. No device is waited for.

    Temporaries: on a CPU below `chunks.WORKSPACE_BYTES`; on a GPU `2 * H_q * SPLITS` floats. Neither grows with n.

    Args:
        queries: `[H_q, D]` float32, all factors on the logits included; query head h reads KV head `h // G`, G = H_q / H_kv.
        keys: `[S, H_kv, D]`, the pool of one layer, any float dtype, read only; heads side by side.
        slots: `[n]` int64, row of each candidate in `keys`, in any order, each below S. n may be 0.
        out: `[n]` float32 contiguous; added to. Nothing else is written.

    Raises:
        ValueError: shapes, dtypes, strides or devices that do not fit, with every reason.
    """
    _check(queries, keys, slots, out)
    if not slots.numel():
        return
    if keys.is_cuda or triton.knobs.runtime.interpret:
        _launch(queries.contiguous(), keys, slots.contiguous(), out)
    else:
        _add_torch(queries, keys, slots, out)


def _check(queries: Tensor, keys: Tensor, slots: Tensor, out: Tensor) -> None:
    reasons = []
    if queries.ndim != 2 or keys.ndim != 3 or queries.shape[1] != keys.shape[2] or queries.shape[0] % keys.shape[1]:
        reasons.append(
            "expected queries [H_q, D] and keys [S, H_kv, D] with one D and a number of KV heads that divides H_q, "
            f"got {list(queries.shape)} and {list(keys.shape)}"
        )
    elif keys.stride(2) != 1 or keys.stride(1) != keys.shape[2]:
        reasons.append(f"expected keys whose heads lie side by side, got strides {keys.stride()}")
    if queries.dtype != torch.float32 or not keys.is_floating_point():
        reasons.append(f"expected float32 queries and floating keys, got {queries.dtype} and {keys.dtype}")
    if slots.ndim != 1 or slots.dtype != torch.int64:
        reasons.append(f"expected int64 slots [n], got {slots.dtype} {list(slots.shape)}")
    if out.shape != slots.shape or out.dtype != torch.float32 or not out.is_contiguous():
        reasons.append(f"expected out contiguous float32 {list(slots.shape)}, got {out.dtype} {list(out.shape)}")
    if len({queries.device, keys.device, slots.device, out.device}) != 1:
        reasons.append(
            f"expected one device, got queries on {queries.device}, keys on {keys.device}, slots on {slots.device} and "
            f"out on {out.device}"
        )
    if reasons:
        raise ValueError("rule score: " + "; ".join(reasons))


def _add_torch(queries: Tensor, keys: Tensor, slots: Tensor, out: Tensor) -> None:
    heads, head_dim = queries.shape
    kv_heads = keys.shape[1]
    grouped = queries.reshape(kv_heads, heads // kv_heads, head_dim).transpose(1, 2)
    parts = list(_chunks(slots.numel(), heads, kv_heads, head_dim))
    peak = grouped.new_full((kv_heads, 1, heads // kv_heads), -math.inf)
    mass = torch.zeros_like(peak)
    for chunk in parts:
        logits = _logits(grouped, keys, slots[chunk])
        higher = torch.maximum(peak, logits.amax(1, keepdim=True))
        mass = mass * (peak - higher).exp() + (logits - higher).exp_().sum(1, keepdim=True)
        peak = higher
    for chunk in parts:
        if len(parts) > 1:
            logits = _logits(grouped, keys, slots[chunk])
        out[chunk] += logits.sub_(peak).exp_().div_(mass).sum(dim=(0, 2))


def _logits(queries: Tensor, keys: Tensor, slots: Tensor) -> Tensor:
    """`[H_kv, c, G]` float32 from queries `[H_kv, D, G]` float32 and the keys of `slots` `[c]`."""
    gathered = keys.index_select(0, slots).to(torch.float32)
    # Keys first: with four or more queries first, the CPU's product sums each dot in one chain, at twice the error.
    return torch.bmm(gathered.transpose(0, 1), queries)


def _chunks(n: int, heads: int, kv_heads: int, head_dim: int) -> Iterator[slice]:
    """Slices of [0, n), each as long as the workspace allows."""
    # Alive at once for a position: its keys as stored (up to 4 bytes), in float32, and in the layout the product wants;
    # then the logits, their exponentials, and the logits of the chunk before.
    per_position = 4 * (3 * kv_heads * head_dim + 3 * heads)
    return chunks(n, per_position)


def _launch(queries: Tensor, keys: Tensor, slots: Tensor, out: Tensor) -> None:
    heads, dim = queries.shape
    n, kv_heads = len(slots), keys.shape[1]
    shape = {"GROUP": heads // kv_heads, "DIM": dim, "DIM_PAD": triton.next_power_of_2(dim), "BLOCK": BLOCK}
    blocks = triton.cdiv(n, BLOCK)
    splits = min(blocks, SPLITS)
    parts = torch.empty(2, heads, splits, dtype=torch.float32, device=keys.device)
    peak_kernel[(splits, kv_heads)](
        queries, keys, slots, parts[0], parts[1], n, keys.stride(0), splits,
        **shape, GROUP_PAD=triton.next_power_of_2(heads // kv_heads),
    )  # fmt: skip
    peak = parts[0].amax(1)
    mass = (parts[1] * (parts[0] - peak[:, None]).exp_()).sum(1)
    share_kernel[(blocks,)](queries, keys, slots, peak, mass, out, n, keys.stride(0), KV_HEADS=kv_heads, **shape)


@triton.jit
def peak_kernel(
    queries, keys, slots, peaks, masses, n, slot_stride, splits,
    GROUP: tl.constexpr, DIM: tl.constexpr, DIM_PAD: tl.constexpr, BLOCK: tl.constexpr, GROUP_PAD: tl.constexpr,
):  # fmt: skip
    """Program (split, KV head): of every `splits`-th block, the largest logit of each head of the group, and the sum of
    `exp(logit - largest)`, to `peaks` and `masses` `[H_q, splits]`."""
    split, head = tl.program_id(0), tl.program_id(1)
    dims = tl.arange(0, DIM_PAD)
    members = tl.arange(0, GROUP_PAD)
    peak = tl.full([GROUP_PAD], float("-inf"), dtype=tl.float32)
    mass = tl.zeros([GROUP_PAD], dtype=tl.float32)
    for first in range(split * BLOCK, n, splits * BLOCK):  # every split has a first block, so no peak stays at -inf
        entries = first + tl.arange(0, BLOCK)
        live = entries < n
        slot = tl.load(slots + entries, mask=live, other=0)
        place = slot[:, None] * slot_stride + head * DIM + dims[None, :]
        tile = tl.load(keys + place, mask=live[:, None] & (dims < DIM)[None, :], other=0.0).to(tl.float32)
        for g in range(GROUP):
            q = tl.load(queries + (head * GROUP + g) * DIM + dims, mask=dims < DIM, other=0.0)
            logit = tl.where(live, tl.sum(tile * q[None, :], axis=1), float("-inf"))
            before = tl.max(tl.where(members == g, peak, float("-inf")), axis=0)
            higher = tl.maximum(before, tl.max(logit, axis=0))
            added = tl.sum(tl.exp(logit - higher), axis=0)
            mass = tl.where(members == g, mass * tl.exp(before - higher) + added, mass)
            peak = tl.where(members == g, higher, peak)
    to = (head * GROUP + members) * splits + split
    tl.store(peaks + to, peak, mask=members < GROUP)
    tl.store(masses + to, mass, mask=members < GROUP)


@triton.jit
def share_kernel(
    queries, keys, slots, peaks, masses, out, n, slot_stride,
    KV_HEADS: tl.constexpr, GROUP: tl.constexpr, DIM: tl.constexpr, DIM_PAD: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Program (block): `out[block's entries] += sum over all heads of exp(logit - peak) / mass`, with `[H_q]` of each."""
    entries = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    live = entries < n
    dims = tl.arange(0, DIM_PAD)
    slot = tl.load(slots + entries, mask=live, other=0)
    total = tl.zeros([BLOCK], dtype=tl.float32)
    for head in range(KV_HEADS):
        place = slot[:, None] * slot_stride + head * DIM + dims[None, :]
        tile = tl.load(keys + place, mask=live[:, None] & (dims < DIM)[None, :], other=0.0).to(tl.float32)
        for g in range(GROUP):
            row = head * GROUP + g
            q = tl.load(queries + row * DIM + dims, mask=dims < DIM, other=0.0)
            logit = tl.sum(tile * q[None, :], axis=1)
            total += tl.exp(logit - tl.load(peaks + row)) / tl.load(masses + row)
    tl.store(out + entries, tl.load(out + entries, mask=live, other=0.0) + total, mask=live)
