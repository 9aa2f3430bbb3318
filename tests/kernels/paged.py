"""Random paged pools and rows for the attention tests, and attention with -inf masks in plain PyTorch."""

from dataclasses import dataclass

import numpy as np
import torch
from torch.nn import functional

from intentkv.apply.live_view import LiveViews


@dataclass
class Paged:
    """One request in a pool of shuffled pages; page 0 belongs to nobody and is full of NaN.

    Attributes:
        keys, values: `[S, H_kv, D]`.
        query: `[T, H_q, D]`, the last T positions of the row.
        row: `[n]` int64, slot of each position, before anything is dropped.
        page_size: slots a page.
    """

    keys: torch.Tensor
    values: torch.Tensor
    query: torch.Tensor
    row: torch.Tensor
    page_size: int

    @property
    def scale(self) -> float:
        return self.query.shape[2] ** -0.5

    def live_slots(self, holes: np.ndarray) -> torch.Tensor:
        """Tombstone `holes` in a row of a table, as the cache does, and ask a live view for what is left."""
        table = torch.zeros(2, len(self.row), dtype=torch.int32)
        table[1] = self.row
        table[1, holes] = torch.from_numpy(holes % self.page_size).int()
        views = LiveViews(table)
        views.set_holes(1, holes, len(self.row))
        return views.slots(1, len(self.row))

    def dropped(self, holes: np.ndarray) -> torch.Tensor:
        """`[n]` Boolean, True at the holes."""
        mask = torch.zeros(len(self.row), dtype=torch.bool)
        mask[holes] = True
        return mask


def paged(
    *,
    length: int,
    queries: int,
    group: int,
    kv_heads: int = 2,
    dim: int = 64,
    page_size: int = 1,
    dtype: torch.dtype = torch.float32,
    seed=0,
) -> Paged:
    random = torch.Generator().manual_seed(seed)
    pages = -(-length // page_size) + 3
    order = torch.randperm(pages - 1, generator=random) + 1
    row = (order[:, None] * page_size + torch.arange(page_size)).flatten()[:length]

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=random).to(dtype)

    keys, values = normal(pages * page_size, kv_heads, dim), normal(pages * page_size, kv_heads, dim)
    keys[:page_size], values[:page_size] = float("nan"), float("nan")
    return Paged(keys, values, normal(queries, kv_heads * group, dim), row, page_size)


def holes_of(kind: str, history: int, seed: int = 0) -> np.ndarray:
    """Dropped positions among the first `history`: which ones a test drops, by name."""
    random = np.random.default_rng(seed)
    return {
        "none": np.arange(0),
        "first": np.array([0]),
        "last": np.array([history - 1]),
        "run": np.arange(history // 4, history // 2),
        "random": np.sort(random.choice(history, history // 2, replace=False)),
        "all but one": np.delete(np.arange(history), history // 3),
    }[kind]


def plain_attention(case: Paged, holes: np.ndarray) -> torch.Tensor:
    """The whole row with -inf at the holes, by `scaled_dot_product_attention` in the dtype of the case; `[T, H_q, D]`."""
    length, queries = len(case.row), len(case.query)
    position = torch.arange(length)
    visible = position[None] <= position[length - queries :, None]
    visible &= ~case.dropped(holes)
    mask = torch.zeros(queries, length, dtype=case.query.dtype).masked_fill_(~visible, float("-inf"))
    q, k, v = (x.transpose(0, 1)[None] for x in (case.query, case.keys[case.row], case.values[case.row]))
    out = functional.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=case.scale, enable_gqa=True)
    return out[0].transpose(0, 1)


def rms(difference: torch.Tensor) -> float:
    """Root mean square, because the largest of a few float32 rounding errors is luck; one wrong element is 10^4 times this."""
    return difference.double().square().mean().sqrt().item()
