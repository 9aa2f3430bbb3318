"""How a few queries share their attention among paged keys: the probabilities themselves, which attention kernels never show.

Every query head needs its softmax's peak and mass over all keys before the first share is known, so keys beyond one
chunk are read twice. That is about the cost of a second attention over the same keys, in float32.
"""

import math
from collections.abc import Iterator
from typing import Literal

import torch
from torch import Tensor

from intentkv.kernels.chunks import chunks

ROWS = 64  # queries looked at together; their logits, not the keys, are then most of the workspace


def attention_shares(
    queries: Tensor,
    keys: Tensor,
    slots: Tensor,
    visible: Tensor,
    scale: float,
    group: Literal["each", "max"] = "each",
) -> Iterator[tuple[slice, slice, Tensor]]:
    """`softmax over j < visible[t] of (scale q[t, h] . k[j, h // G])`, a chunk of queries and of keys at a time.

    Temporaries stay below `chunks.WORKSPACE_BYTES` whatever T and m are. What is yielded may be written to.

    Args:
        queries: `[T, H_q, D]`, any float dtype.
        keys: `[S, H_kv, D]`, the pool of one layer, any float dtype; H_kv divides H_q. Read in place.
        slots: `[m]` int64, the keys that may be seen, in order of position.
        visible: `[T]` int64 on the CPU, how many of the first `slots` each query sees; from 1 to m.
        scale: factor on the logits, usually `D ** -0.5`.
        group: `max` takes the largest logit of the G query heads of a KV head, which then has one softmax.

    Yields:
        a slice of t queries, a slice of c `slots`, and the shares `[H_kv, c, G or 1, t]` float32. Each pair of query and key
        comes once, or not at all where none of the t queries sees the key.

    Raises:
        ValueError: shapes that do not fit, or a query that sees nothing or more than there is, with every reason.
    """
    _check(queries, keys, slots, visible)
    for start in range(0, len(queries), ROWS):
        rows = slice(start, min(start + ROWS, len(queries)))
        for chunk, shares in _shares_of_rows(queries[rows], keys, slots, visible[rows], scale, group):
            yield rows, chunk, shares


def _shares_of_rows(
    queries: Tensor, keys: Tensor, slots: Tensor, visible: Tensor, scale: float, group: str
) -> Iterator[tuple[slice, Tensor]]:
    count, heads, dim = queries.shape
    kv_heads = keys.shape[1]
    scaled = (queries.to(torch.float32) * scale).view(count, kv_heads, heads // kv_heads, dim)
    scaled = scaled.permute(1, 3, 2, 0).flatten(2)  # [H_kv, D, G * t]
    everyone_sees, someone_sees = int(visible.min()), int(visible.max())
    limits = visible.to(slots.device)

    def logits_of(chunk: slice) -> Tensor:
        # Keys first: with four or more queries first, the CPU's product sums each dot in one chain, at twice the error.
        gathered = keys.index_select(0, slots[chunk]).to(torch.float32)
        logits = torch.bmm(gathered.transpose(0, 1), scaled).view(kv_heads, len(gathered), -1, count)
        if group == "max":
            logits = logits.amax(2, keepdim=True)
        if chunk.stop > everyone_sees:
            index = torch.arange(chunk.start, chunk.stop, device=slots.device)
            logits.masked_fill_((index[:, None] >= limits)[None, :, None], -math.inf)
        return logits

    # Alive at once for a key: as stored (up to 4 bytes), in float32, in the layout the product wants; then its logits,
    # their exponentials and the logits of the chunk before.
    parts = list(chunks(someone_sees, 4 * (3 * kv_heads * dim + 3 * heads * count)))
    groups = 1 if group == "max" else heads // kv_heads
    peak = scaled.new_full((kv_heads, 1, groups, count), -math.inf)
    mass = torch.zeros_like(peak, dtype=torch.float64)  # many chunks would add up their rounding
    for chunk in parts:  # every query sees the first key, so no peak stays at -inf
        logits = logits_of(chunk)
        higher = torch.maximum(peak, logits.amax(1, keepdim=True))
        mass = mass * (peak - higher).double().exp() + (logits - higher).exp_().sum(1, keepdim=True)
        peak = higher
    mass = mass.to(torch.float32)
    for chunk in parts:
        if len(parts) > 1:
            logits = logits_of(chunk)
        yield chunk, logits.sub_(peak).exp_().div_(mass)


def _check(queries: Tensor, keys: Tensor, slots: Tensor, visible: Tensor) -> None:
    reasons = []
    if queries.ndim != 3 or keys.ndim != 3 or queries.shape[2] != keys.shape[2] or queries.shape[1] % keys.shape[1]:
        reasons.append(
            "expected queries [T, H_q, D] and keys [S, H_kv, D] with H_kv dividing H_q, "
            f"got {list(queries.shape)} and {list(keys.shape)}"
        )
    if visible.device.type != "cpu" or visible.shape != queries.shape[:1]:
        reasons.append(f"expected one count a query on the CPU, got {list(visible.shape)} on {visible.device}")
    elif len(visible) and not 1 <= int(visible.min()) <= int(visible.max()) <= len(slots):
        reasons.append(
            f"expected every query to see 1 to {len(slots)} keys, got {int(visible.min())} to {int(visible.max())}"
        )
    if reasons:
        raise ValueError("attention_shares: " + "; ".join(reasons))
