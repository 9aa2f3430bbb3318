"""A Qwen3 in plain PyTorch and float64, with positions that some queries cannot see."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import Tensor


class Reference:
    """The model of a checkpoint folder, as the papers write it: no cache, no fused operator, one text at a time."""

    def __init__(self, folder: Path) -> None:
        self.config = json.loads((folder / "config.json").read_text())
        weights = {name: w.double() for file in folder.glob("*.safetensors") for name, w in load_file(file).items()}
        self.weights = {name.removeprefix("model."): weight for name, weight in weights.items()}

    def __call__(self, ids: Tensor, hidden: Tensor) -> tuple[Tensor, Tensor]:
        """Logits `[n, V]` and rotated queries `[L, n, H_q, D]`, float64, of `ids` `[n]` int64.

        Args:
            hidden: `[n, n]` Boolean, what each token cannot see of what comes before it.
        """
        x = self.weights["embed_tokens.weight"][ids]
        sees = torch.ones_like(hidden).tril() & ~hidden
        queries = []
        for number in range(self.config["num_hidden_layers"]):
            attended, query = self._attention(f"layers.{number}.self_attn.", self._layer_norm(x, number, "input"), sees)
            x = x + attended
            x = x + self._mlp(f"layers.{number}.mlp.", self._layer_norm(x, number, "post_attention"))
            queries.append(query)
        return self._norm(x, "norm.weight") @ self.weights["lm_head.weight"].T, torch.stack(queries)

    def _attention(self, prefix: str, x: Tensor, sees: Tensor) -> tuple[Tensor, Tensor]:
        dim, heads, kv_heads = (self.config[key] for key in ("head_dim", "num_attention_heads", "num_key_value_heads"))
        q = self._rotate(self._norm(self._project(x, prefix + "q_proj", dim), prefix + "q_norm.weight"))
        k = self._rotate(self._norm(self._project(x, prefix + "k_proj", dim), prefix + "k_norm.weight"))
        v = self._project(x, prefix + "v_proj", dim)
        group = heads // kv_heads
        k, v = (each.repeat_interleave(group, dim=1) for each in (k, v))
        logits = torch.einsum("qhd,khd->hqk", q, k) * dim**-0.5
        shares = logits.masked_fill(~sees, -torch.inf).softmax(-1)
        out = torch.einsum("hqk,khd->qhd", shares, v).flatten(1)
        return out @ self.weights[prefix + "o_proj.weight"].T, q

    def _mlp(self, prefix: str, x: Tensor) -> Tensor:
        gate, up, down = (self.weights[f"{prefix}{name}_proj.weight"].T for name in ("gate", "up", "down"))
        return (torch.nn.functional.silu(x @ gate) * (x @ up)) @ down

    def _project(self, x: Tensor, name: str, dim: int) -> Tensor:
        return (x @ self.weights[name + ".weight"].T).view(len(x), -1, dim)

    def _layer_norm(self, x: Tensor, number: int, which: str) -> Tensor:
        return self._norm(x, f"layers.{number}.{which}_layernorm.weight")

    def _norm(self, x: Tensor, name: str) -> Tensor:
        return x * (x.square().mean(-1, keepdim=True) + self.config["rms_norm_eps"]).rsqrt() * self.weights[name]

    def _rotate(self, x: Tensor) -> Tensor:
        """`[n, H, D]`, token i by the angles of position i; the halves of a head are the two coordinates."""
        base = self.config["rope_parameters"]["rope_theta"]
        half = x.shape[-1] // 2
        frequencies = base ** (-torch.arange(half, dtype=torch.float64) / half)
        angles = torch.arange(len(x), dtype=torch.float64)[:, None] * frequencies
        cos, sin = angles.cos()[:, None], angles.sin()[:, None]
        a, b = x.split(half, dim=-1)
        return torch.cat((a * cos - b * sin, b * cos + a * sin), -1)
