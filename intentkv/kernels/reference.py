"""Slow, obvious loops in float64: what the kernels must compute."""

from collections.abc import Sequence

import torch


def paged_attention_reference(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    slots: Sequence[torch.Tensor],
    query_lens: Sequence[int],
    scale: float,
    dropped: Sequence[torch.Tensor] | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Same contract as `attention.paged_attention`, one softmax a query and head.

    Args:
        dropped: optional, one `[n_i]` Boolean tensor a request: where True the logit becomes -inf, which is the definition of
            a masked position.

    Returns:
        output `[T, H_q, D]` and LSE `[T, H_q]`, both float64.
    """
    heads = query.shape[1]
    group = heads // keys.shape[1]
    output = torch.zeros(query.shape, dtype=torch.float64)
    lse = torch.zeros(query.shape[:2], dtype=torch.float64)
    token = 0
    for i, count in enumerate(query_lens):
        for t in range(count):
            visible = len(slots[i]) - (count - 1 - t)
            index = slots[i][:visible]
            for h in range(heads):
                logits = scale * keys[index, h // group].double() @ query[token, h].double()
                if dropped is not None:
                    logits = logits.masked_fill(dropped[i][:visible], float("-inf"))
                lse[token, h] = logits.logsumexp(0)
                output[token, h] = (logits - lse[token, h]).exp() @ values[index, h // group].double()
            token += 1
    return output, lse


def token_surprise_reference(
    hidden: torch.Tensor, targets: torch.Tensor, head: torch.Tensor, frequent: int, scale: float = 1.0
) -> torch.Tensor:
    """Same contract as `surprise.token_surprise`, one token at a time; `[T]` float64."""
    surprise = torch.zeros(len(hidden), dtype=torch.float64)
    for t, target in enumerate(targets.tolist()):
        vocabulary = list(range(min(frequent, len(head))))
        if target not in vocabulary:
            vocabulary.append(target)
        logits = scale * head[vocabulary].double() @ hidden[t].double()
        surprise[t] = logits.logsumexp(0) - logits[vocabulary.index(target)]
    return surprise


def attention_shares_reference(
    queries: torch.Tensor, keys: torch.Tensor, slots: torch.Tensor, visible: torch.Tensor, scale: float
) -> torch.Tensor:
    """Same contract as `attention_shares.attention_shares` with `group="each"`; all shares at once, `[H_q, m, T]` float64."""
    count, heads = queries.shape[:2]
    group = heads // keys.shape[1]
    shares = torch.zeros(heads, len(slots), count, dtype=torch.float64)
    for t in range(count):
        seen = int(visible[t])
        for h in range(heads):
            logits = scale * keys[slots[:seen], h // group].double() @ queries[t, h].double()
            shares[h, :seen, t] = logits.softmax(0)
    return shares


def rule_score_reference(queries: torch.Tensor, keys: torch.Tensor, slots: torch.Tensor) -> torch.Tensor:
    """What `rule_score.add_rule_score` adds, by one softmax a query head; `[n]` float64."""
    heads, kv_heads = len(queries), keys.shape[1]
    total = torch.zeros(len(slots), dtype=torch.float64)
    for h in range(heads):
        logits = keys[slots, h // (heads // kv_heads)].double() @ queries[h].double()
        total += logits.softmax(0)
    return total


def recover_attention_reference(
    query: torch.Tensor, keys: torch.Tensor, slots: Sequence[torch.Tensor], scale: float
) -> tuple[list[torch.Tensor], torch.Tensor]:
    """What `recover.recover_attention` adds, by one softmax a query head; and the LSE that `lse.log_sum_exp` gives.

    Returns:
        one `[H_kv, n_i]` a request, and the LSE `[R, H_q]`, all float64.
    """
    heads, kv_heads = query.shape[1], keys.shape[1]
    lse = torch.full(query.shape[:2], float("-inf"), dtype=torch.float64)
    scores = []
    for r, index in enumerate(slots):
        best = torch.zeros(kv_heads, len(index), dtype=torch.float64)
        for h in range(heads):
            head = h // (heads // kv_heads)
            logits = scale * keys[index, head].double() @ query[r, h].double()
            lse[r, h] = logits.logsumexp(0)
            best[head] = torch.maximum(best[head], logits.softmax(0))
        scores.append(best)
    return scores, lse


def copy_slots_reference(pool: torch.Tensor, sources: torch.Tensor, destinations: torch.Tensor) -> torch.Tensor:
    """`pool` `[S, H_kv, D]` after `compact.copy_slots`, one entry at a time, as a new tensor."""
    after = pool.clone()
    for source, destination in zip(sources.tolist(), destinations.tolist(), strict=True):
        after[destination] = pool[source]
    return after
