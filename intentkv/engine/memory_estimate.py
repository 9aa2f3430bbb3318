"""How many agents a pool holds, with and without intentkv: arithmetic on the model's config.json and the flags.

No weights are loaded and no server is asked, so it is an estimate: system prompts and newest messages come on top of a
budget, and what agents share through the radix tree is counted for each.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from intentkv import config
from intentkv.config import Settings
from intentkv.errors import SettingsError

GPU_FRACTION = 0.85  # of the device's memory for weights and pool, where --mem-fraction-static does not say
_DTYPE_BYTES = {"float32": 4, "float16": 2, "bfloat16": 2, "fp8_e4m3": 1, "fp8_e5m2": 1}


@dataclass(frozen=True)
class ModelShape:
    """What of a model decides the size of its cache. `context` in tokens, `bytes_per_token` of all layers together."""

    architecture: str
    layers: int
    kv_heads: int
    head_dim: int
    context: int
    bytes_per_token: int


@dataclass(frozen=True)
class MemoryEstimate:
    """`agents_*`: idle sessions of `session_tokens` each that the pool holds, whole and pruned to `live_tokens`."""

    pool_tokens: int
    pool_from: str
    session_tokens: int
    live_tokens: int
    agents_stock: int
    agents_intentkv: int

    def __str__(self) -> str:
        return (
            f"this model at this budget holds {self.agents_intentkv:,} agents instead of {self.agents_stock:,}: "
            f"sessions of {self.session_tokens:,} tokens, {self.live_tokens:,} of them live, in a pool of "
            f"{self.pool_tokens:,} tokens ({self.pool_from}); system prompts and newest messages come on top"
        )


def examine_memory(flags: Sequence[str]) -> tuple[ModelShape | None, MemoryEstimate | None, str]:
    """The model's shape and the estimate for a server with these flags, each None where it cannot be had; and why."""
    known = _parser().parse_known_args(list(flags))[0]
    if known.model_path is None:
        return None, None, "no --model-path was given"
    try:
        folder = _folder(known.model_path)
        shape = read_shape(folder, known.kv_cache_dtype)
        known.enable_intentkv = True
        settings = config.settings_from_flags(known)
        pool, source = _pool(known, folder, shape)
    except (OSError, ValueError, KeyError, TypeError) as error:
        reasons = "; ".join(error.reasons) if isinstance(error, SettingsError) else error
        return None, None, f"no memory estimate: {reasons}"
    assert settings is not None
    if pool is None:
        return shape, None, source
    session = min(shape.context, int(known.context_length or shape.context))
    return shape, estimate(settings, session, pool, source), ""


def estimate(settings: Settings, session: int, pool: int, source: str) -> MemoryEstimate:
    """Agents at the end of a turn; an event leaves less than `trigger` tokens above the budget. All in tokens."""
    history = max(0, session - settings.recent)
    live = min(session, settings.recent + settings.budget.tokens(history) + settings.trigger - 1)
    after = pool if settings.layout == "reclaim" else 0
    stock = pool // session
    return MemoryEstimate(pool, source, session, live, stock, max(stock, after // live))


def read_shape(folder: Path, kv_dtype: str = "auto") -> ModelShape:
    """The shape in `folder/config.json`. Raises OSError, ValueError or KeyError where it does not say."""
    whole: dict[str, Any] = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    text: dict[str, Any] = {**whole, **whole.get("text_config", {})}
    heads = int(text["num_attention_heads"])
    layers, kv_heads = int(text["num_hidden_layers"]), int(text.get("num_key_value_heads") or heads)
    head_dim = int(text.get("head_dim") or int(text["hidden_size"]) // heads)
    dtype = kv_dtype if kv_dtype != "auto" else str(text.get("dtype") or text.get("torch_dtype") or "bfloat16")
    size = _DTYPE_BYTES.get(dtype, 2)
    return ModelShape(
        architecture=", ".join(whole.get("architectures") or ["unknown"]),
        layers=layers,
        kv_heads=kv_heads,
        head_dim=head_dim,
        context=int(text["max_position_embeddings"]),
        bytes_per_token=2 * layers * kv_heads * head_dim * size,
    )


def _folder(model: str) -> Path:
    """Where the files of `model` are: a folder, or what the hub's cache has of it. Nothing is downloaded."""
    if Path(model).is_dir():
        return Path(model)
    from huggingface_hub import try_to_load_from_cache

    found = try_to_load_from_cache(model, "config.json")
    if not isinstance(found, str):
        raise FileNotFoundError(f"{model} is no folder and not in the hub's cache")
    return Path(found).parent


def _pool(known: argparse.Namespace, folder: Path, shape: ModelShape) -> tuple[int | None, str]:
    if known.max_total_tokens is not None:
        return known.max_total_tokens, "--max-total-tokens"
    if not torch.cuda.is_available():
        return None, "no memory estimate: without a GPU, give --max-total-tokens"
    fraction = known.mem_fraction_static or GPU_FRACTION
    device = torch.cuda.get_device_properties(0).total_memory
    weights = sum(file.stat().st_size for file in folder.glob("*.safetensors")) // known.tp_size
    # Ranks share the KV heads among them, as far as there are enough.
    per_token = max(1, shape.bytes_per_token // min(known.tp_size, shape.kv_heads))
    tokens = int(device * fraction - weights) // per_token
    if tokens <= 0:
        return None, "no memory estimate: the weights alone fill the device"
    return tokens, f"about {fraction:.0%} of the GPU less the weights"


def _parser() -> argparse.ArgumentParser:
    """The few server flags that matter here, as SGLang spells them, and ours."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--model-path", "--model")
    parser.add_argument("--max-total-tokens", type=int)
    parser.add_argument("--context-length", type=int)
    parser.add_argument("--mem-fraction-static", type=float)
    parser.add_argument("--kv-cache-dtype", default="auto")
    parser.add_argument("--tensor-parallel-size", "--tp-size", "--tp", dest="tp_size", type=int, default=1)
    config.add_flags(parser)
    return parser
