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
    _check(hidden, targets, head)
    frequent = head[:FREQUENT]
    surprise = torch.empty(len(hidden), dtype=torch.float32, device=hidden.device)
    rows = max(1, _WORKSPACE_BYTES // (4 * (2 * len(frequent) + 4 * head.shape[1])))
    for start in range(0, len(hidden), rows):
        piece = slice(start, start + rows)
        mass = (scale * _product(hidden[piece], frequent)).logsumexp(-1)
        own = scale * (hidden[piece].float() * head.index_select(0, targets[piece]).float()).sum(-1)
        rare = own.masked_fill(targets[piece] < len(frequent), -torch.inf)  # a frequent one is in the sum already
        surprise[piece] = torch.logaddexp(mass, rare) - own
    return surprise.clamp_(min=0)


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
