"""Queries and keys of a forward, as the serving path sees them: rotated, before attention, every layer."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AttentionInterface, AutoConfig, AutoModel
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import AttentionMaskInterface, sdpa_mask

from intentkv.observe.query_mean import QueryMean
from intentkv.score.head.identity import ModelIdentity

_ATTENTION = "intentkv_capture"


@dataclass
class Captured:
    """What one forward of N tokens gave.

    Attributes:
        spans: `[start, end)` of the tokens whose queries were asked for.
        dtype: the checkpoint's own, in which a pool would hold its keys.
        keys: layer -> `[N, H_kv, D]` rotated keys in `dtype`.
        queries: one mean a span.
    """

    spans: Sequence[tuple[int, int]]
    dtype: torch.dtype
    keys: list[Tensor] = field(default_factory=list)
    queries: list[QueryMean] = field(init=False)

    def __post_init__(self) -> None:
        self.queries = [QueryMean() for _ in self.spans]

    def take(self, layer: int, query: Tensor, key: Tensor) -> None:
        """Take one layer: query `[H_q, N, D]`, key `[H_kv, N, D]`."""
        self.keys.append(key.transpose(0, 1).to(self.dtype, copy=True))
        for (start, end), mean in zip(self.spans, self.queries, strict=True):
            mean.add(layer, query[:, start:end].transpose(0, 1))


class CaptureModel:
    """A causal model whose forward hands out rotated queries and keys; its language-model head is not loaded.

    Computes in float32, which CPUs without bf16 instructions do several times faster than bf16.
    """

    def __init__(self, path: str | Path) -> None:
        """`path`: a checkpoint folder or hub name."""
        config = AutoConfig.from_pretrained(path)
        self.identity = ModelIdentity.of(Path(path).name, config)
        self._dtype: torch.dtype = config.get_text_config().dtype or torch.float32
        self.model: Any = AutoModel.from_pretrained(path, dtype=torch.float32, attn_implementation=_ATTENTION).eval()

    @torch.inference_mode()
    def forward(self, ids: Tensor, spans: Sequence[tuple[int, int]]) -> Captured:
        """Run `ids` `[N]` int64 from position 0; the mean queries of `spans` and the keys of all tokens come back."""
        captured = Captured(spans, self._dtype)
        self.model(ids.unsqueeze(0), use_cache=False, captured=captured)
        return captured


def _attend(module: Any, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, **kwargs: Any) -> Any:
    """Attention of one layer, after what comes to it was taken: query `[1, H_q, N, D]`, key and value `[1, H_kv, N, D]`."""
    captured: Captured = kwargs.pop("captured")
    captured.take(module.layer_idx, query[0], key[0])
    return sdpa_attention_forward(module, query, key, value, mask, **kwargs)


AttentionInterface.register(_ATTENTION, _attend)
AttentionMaskInterface.register(_ATTENTION, sdpa_mask)
