"""How surprising each token of a prefill was to the model itself, from hidden states the prefill has anyway.

The whole LM head over every prompt token would cost a quarter of the prefill of a small model. The softmax's mass lies almost
wholly on frequent tokens, and byte-pair vocabularies are numbered by the order of their merges, the frequent first: so the sum
runs over the first `FREQUENT` tokens and the token that came. What is left out makes rare tokens look a little less surprising;
against the whole vocabulary of SmolLM2 (49,152 tokens) the correlation over a session's tokens is 0.987, at a twelfth of the cost.
"""

import torch

FREQUENT = 4096  # tokens of the vocabulary that the softmax is taken over
_WORKSPACE_BYTES = 24 * 2**20


def token_surprise(hidden: torch.Tensor, targets: torch.Tensor, head: torch.Tensor, scale: float = 1.0) -> torch.Tensor:
    """`-log p(targets[t])` under the softmax of `scale * head @ hidden[t]` over the frequent tokens and the target, in nats.

    Rows are taken in pieces whose logits stay below 24 MiB, whatever T is. Nothing is written to and no device is waited for.

    Args:
        hidden: `[T, E]`, final hidden states, any float dtype.
        targets: `[T]` int64, the token that follows each row, each below V.
        head: `[V, E]`, the LM head's weight, same dtype and device as `hidden`.
        scale: factor on the logits that the model applies.

    Returns:
        `[T]` float32, each >= 0.

    Raises:
        ValueError: shapes or dtypes that do not fit, with every reason.
    """
    return surprise_of(*shard_logits(hidden, targets, head, scale), targets)


def shard_logits(
    hidden: torch.Tensor, targets: torch.Tensor, head: torch.Tensor, scale: float = 1.0, first: int = 0
) -> tuple[torch.Tensor, torch.Tensor]:
    """What a piece of the LM head says of the logits: that of a rank, where ranks share the vocabulary, or all of it.

    Args:
        hidden, targets, scale: as of `token_surprise`, from which come the errors too.
        head: `[v, E]`, the weights of tokens `[first, first + v)`.

    Returns:
        mass: `[T]` float32, log-sum-exp of the logits of the piece's frequent tokens; -inf where it has none.
        own: `[T]` float32, the target's logit; 0 where the piece does not have the target.
    """
    _check(hidden, targets, head)
    frequent = head[: max(0, FREQUENT - first)]
    mass = torch.full((len(hidden),), -torch.inf, dtype=torch.float32, device=hidden.device)
    own = torch.zeros_like(mass)
    if not len(head):
        return mass, own
    rows = max(1, _WORKSPACE_BYTES // (4 * (2 * len(frequent) + 4 * head.shape[1])))
    for start in range(0, len(hidden), rows):
        piece = slice(start, start + rows)
        if len(frequent):
            mass[piece] = (scale * _product(hidden[piece], frequent)).logsumexp(-1)
        at = targets[piece] - first
        elsewhere = (at < 0) | (at >= len(head))
        weights = head.index_select(0, at.masked_fill(elsewhere, 0))
        own[piece] = (scale * (hidden[piece].float() * weights.float()).sum(-1)).masked_fill_(elsewhere, 0.0)
    return mass, own


def surprise_of(mass: torch.Tensor, own: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """The surprise `[T]` from what `shard_logits` says of a whole head, or what all its pieces say together."""
    rare = own.masked_fill(targets < FREQUENT, -torch.inf)  # a frequent one is in the mass already
    return (torch.logaddexp(mass, rare) - own).clamp_(min=0)


def logit_surprise(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """The same of rows whose logits are there: `-log p(targets[b])` over the frequent tokens and the target, in nats.

    Args:
        logits: `[B, V]`, any float dtype, with the model's own factor on them. targets: `[B]` int64, each below V.

    Returns:
        `[B]` float32, each >= 0.
    """
    mass = logits[:, :FREQUENT].float().logsumexp(-1)
    return surprise_of(mass, logits.gather(1, targets[:, None])[:, 0].float(), targets)


def _product(hidden: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """`[t, F]` float32. Many CPUs multiply bf16 an order of magnitude slower than float32 (see `kernels.linear`)."""
    if hidden.device.type == "cpu":
        return hidden.float() @ weight.float().T
    return (hidden @ weight.T).float()


def _check(hidden: torch.Tensor, targets: torch.Tensor, head: torch.Tensor) -> None:
    reasons = []
    if hidden.ndim != 2 or head.ndim != 2 or hidden.shape[-1] != head.shape[-1]:
        reasons.append(f"expected hidden [T, E] and head [V, E], got {list(hidden.shape)} and {list(head.shape)}")
    if targets.shape != hidden.shape[:1]:
        reasons.append(f"expected one target a row of hidden, got {list(targets.shape)} for {list(hidden.shape)}")
    if hidden.dtype != head.dtype or not hidden.is_floating_point():
        reasons.append(f"expected hidden and head of one float dtype, got {hidden.dtype} and {head.dtype}")
    if targets.dtype != torch.int64:
        reasons.append(f"expected int64 targets, got {targets.dtype}")
    if reasons:
        raise ValueError("token_surprise: " + "; ".join(reasons))
