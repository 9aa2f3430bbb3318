"""Attention over a paged pool on the CPU, in plain PyTorch: grouped queries, any list of slots, causal from the end.

What PyTorch's own entry point costs here, and what is done instead:

- `scaled_dot_product_attention(enable_gqa=True)` copies K and V once per query head. The G query heads that share a KV head
  are stacked as G*T rows of one attention problem, so K and V are read once.
- its causal mask counts from the start, so a caller with a cached prefix must pad its queries to the whole sequence. Prefix
  and new tokens are two problems here, the first without a mask, merged exactly through their log-sum-exp.

The operator behind `scaled_dot_product_attention` on the CPU is called directly because it alone also returns the LSE.
"""

from collections.abc import Sequence

import torch

_flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu


def paged_attention(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    slots: Sequence[torch.Tensor],
    query_lens: Sequence[int],
    scale: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attend each request's queries to the slots it lists.

    Request `i` owns the next `query_lens[i]` = T_i rows of `query` and reads `slots[i]`, whose last T_i entries hold the keys
    of those very tokens: query `t` of T_i sees every slot but the last `T_i - 1 - t`. Decode is T_i = 1. A slot that is not
    listed is not read at all, so leaving dropped positions out masks them exactly.

    Args:
        query: `[T, H_q, D]`, CPU, T = sum of `query_lens`.
        keys, values: `[S, H_kv, D]`, the pool of one layer, same dtype as `query`; H_kv divides H_q, and query head `h` reads
            KV head `h // (H_q // H_kv)`.
        slots: one `[n_i]` int64 tensor a request, n_i >= T_i, each below S (checked by the gather, which raises IndexError).
        query_lens: T_i >= 1 of each request.
        scale: factor on the logits, usually `D ** -0.5`.

    Returns:
        output `[T, H_q, D]` in the dtype of `query`, and the natural log-sum-exp of the scaled logits, `[T, H_q]` float32.

    Raises:
        ValueError: shapes, dtypes or devices that do not fit, with every reason.
    """
    _check(query, keys, values, slots, query_lens)
    output = torch.empty_like(query)
    lse = torch.empty(query.shape[:2], dtype=torch.float32)
    start = 0
    for index, count in zip(slots, query_lens, strict=True):
        end = start + count
        k, v = keys.index_select(0, index), values.index_select(0, index)
        output[start:end], lse[start:end] = _attend_one(query[start:end], k, v, scale)
        start = end
    return output, lse


def _attend_one(
    query: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """One request: query `[T, H_q, D]`, its keys and values `[n, H_kv, D]` in order."""
    count = len(query)
    prefix = len(k) - count
    shape = query.shape
    if count == 1:
        out, lse = _attend_all(query, k, v, scale)
    elif prefix == 0:
        out, lse = _attend_causal(query, k, v, scale)
    else:
        # In bf16 each half would be rounded before the merge, and the result after it. Widening costs nothing at this size.
        query, k, v = query.float(), k.float(), v.float()
        old, old_lse = _attend_all(query, k[:prefix], v[:prefix], scale)
        new, new_lse = _attend_causal(query, k[prefix:], v[prefix:], scale)
        lse = torch.logaddexp(old_lse, new_lse)
        out = old * (old_lse - lse).exp_().unsqueeze(-1) + new * (new_lse - lse).exp_().unsqueeze(-1)
    # [H_kv, G, T, ...] -> [T, H_q, ...]
    return out.permute(2, 0, 1, 3).reshape(shape), lse.permute(2, 0, 1).reshape(shape[:2])


def _attend_all(
    query: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Every query sees every key; the G heads of a group are rows of one problem. Returns `[H_kv, G, T, D]`, `[H_kv, G, T]`."""
    grouped = _by_group(query, k.shape[1])
    rows = grouped.flatten(1, 2).unsqueeze(0)
    out, lse = _flash(rows, k.unsqueeze(0).transpose(1, 2), v.unsqueeze(0).transpose(1, 2), scale=scale)
    return out.view(grouped.shape), lse.view(grouped.shape[:3])


def _attend_causal(
    query: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """As many keys as queries, causal; the group is a batch that shares one copy of K and V. Returns as `_attend_all`."""
    grouped = _by_group(query, k.shape[1]).transpose(0, 1)
    batch = (len(grouped), -1, -1, -1)
    k, v = (x.unsqueeze(0).transpose(1, 2).expand(batch) for x in (k, v))
    out, lse = _flash(grouped, k, v, 0.0, True, scale=scale)
    return out.transpose(0, 1), lse.transpose(0, 1)


def _by_group(query: torch.Tensor, kv_heads: int) -> torch.Tensor:
    """`[T, H_q, D]` -> `[H_kv, G, T, D]`."""
    count, heads, dim = query.shape
    return query.view(count, kv_heads, heads // kv_heads, dim).permute(1, 2, 0, 3)


def _check(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    slots: Sequence[torch.Tensor],
    query_lens: Sequence[int],
) -> None:
    reasons = []
    if query.dim() != 3 or keys.dim() != 3 or keys.shape != values.shape:
        reasons.append(
            "expected query [T, H_q, D] and keys and values of one shape [S, H_kv, D], "
            f"got {list(query.shape)}, {list(keys.shape)} and {list(values.shape)}"
        )
    elif query.shape[2] != keys.shape[2] or query.shape[1] % keys.shape[1]:
        reasons.append(
            f"expected one head size and H_q a multiple of H_kv, got query {list(query.shape)}, keys {list(keys.shape)}"
        )
    if not query.dtype == keys.dtype == values.dtype or not query.dtype.is_floating_point:
        reasons.append(f"expected one floating dtype, got {query.dtype}, {keys.dtype}, {values.dtype}")
    if not query.device.type == keys.device.type == values.device.type == "cpu":
        reasons.append(f"expected CPU tensors, got {query.device}, {keys.device}, {values.device}")
    if len(slots) != len(query_lens) or sum(query_lens) != len(query):
        reasons.append(
            f"expected one slot list and one length a request and {len(query)} queries in all, "
            f"got {len(slots)} lists and lengths {list(query_lens)}"
        )
    for i, (index, count) in enumerate(zip(slots, query_lens)):
        if index.dtype != torch.int64 or index.dim() != 1 or not 1 <= count <= len(index):
            reasons.append(
                f"request {i}: expected at least one query and as many int64 slots as queries or more, "
                f"got {count} queries and {index.dtype} {list(index.shape)}"
            )
    if reasons:
        raise ValueError("\n".join(reasons))
