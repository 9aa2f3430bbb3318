"""What the residual head looks at, read from the paged keys: the same code when serving and when making training data."""

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from intentkv.score.base import ScoreInput
from intentkv.score.head.model import ATTENTION_WIDTH, HIDDEN_WIDTH, ResidualHead

WORKSPACE_BYTES = 16 * 2**20  # of one chunk; with the query span's own part it stays below 32 MiB
SPAN_TOKENS = 4096  # of a longer query span the last tokens are attended to: about 7 MiB at D = 128


def mean_keys(layer_keys: Callable[[int], Tensor], slots: Tensor, num_layers: int) -> Tensor:
    """Mean over layers and KV heads of the keys of `slots` `[n]` int64: `[n, D]` float32 on the keys' device.

    Each KV head serves as many query heads as any other, so this is the mean over query heads too. Reads the pool in
    place, one layer and one chunk at a time. Under tensor parallelism the heads are this rank's.
    """
    first = layer_keys(0)
    heads, head_dim = first.shape[1:]
    total = torch.zeros(slots.numel(), head_dim, dtype=torch.float32, device=first.device)
    # Alive at once for a position: its keys as stored and, on the CPU, widened; then their sum.
    for chunk in _chunks(slots.numel(), 4 * (2 * heads * head_dim + head_dim)):
        for layer in range(num_layers):
            gathered = layer_keys(layer).index_select(0, slots[chunk])
            total[chunk] += gathered.sum(dim=1, dtype=torch.float32)
    return total.div_(num_layers * heads)


def mean_memory(memory: Tensor) -> Tensor:
    """Mean over layers and query heads of M_t `[L, H_q, D]`: `[D]` float32."""
    return memory.float().mean(dim=(0, 1))


@torch.no_grad()
def residual(head: ResidualHead, x: ScoreInput, rule: Tensor) -> Tensor:
    """The head's correction of every candidate of `x`: `[n]` float32 on the device of `rule` `[n]`.

    Works in chunks of positions, so that what it allocates besides the result does not grow with n. The head is not linear,
    so under tensor parallelism it is each chunk's features that are averaged over the ranks.
    """
    correction = torch.zeros_like(rule)
    if not rule.numel():
        return correction
    assert x.memory is not None, "the rule score has read it"
    memory = x.ranks.mean(mean_memory(x.memory).to(rule.device))
    span = x.ranks.mean(mean_keys(x.layer_keys, x.query_slots[-SPAN_TOKENS:], x.num_layers))
    # Alive at once for a position: its mean key, phi and phi with c_j, query and c_j, hidden before and after GELU.
    width = head.head_dim + 2 * (3 * head.head_dim + 1) + 4 * ATTENTION_WIDTH + 2 * HIDDEN_WIDTH
    kv_heads = x.layer_keys(0).shape[1]
    for chunk in _chunks(rule.numel(), 4 * (width + 2 * kv_heads * head.head_dim)):
        keys = x.ranks.mean(mean_keys(x.layer_keys, x.slots[chunk], x.num_layers))
        correction[chunk] = head(keys, memory, rule[chunk], span)
    return correction


def _chunks(n: int, bytes_per_position: int) -> Iterator[slice]:
    """Slices of [0, n), each as long as the workspace allows."""
    step = max(1, WORKSPACE_BYTES // bytes_per_position)
    for start in range(0, n, step):
        yield slice(start, min(start + step, n))
