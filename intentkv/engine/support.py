"""What intentkv cannot serve, checked before weights are loaded: one line a reason, each with what to do."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from sglang.srt.environ import envs

from intentkv.errors import SettingsError
from intentkv.score.registry import WHOLE_GROUPS

# Backends that read live views; any other would read tombstones as keys. All but the first: see `live_backends`.
ATTENTION_BACKENDS = ("intentkv_cpu", "triton", "flashinfer", "fa3")

_Rule = tuple[Callable[[Any], Any], str]

_RULES: tuple[_Rule, ...] = (
    (
        lambda c: c.enable_hierarchical_cache,
        "--enable-hierarchical-cache copies rows with holes to the host: remove it",
    ),
    (lambda c: c.enable_lmcache, "--enable-lmcache replaces the radix cache that intentkv extends: remove it"),
    (lambda c: c.enable_flexkv, "--enable-flexkv replaces the radix cache that intentkv extends: remove it"),
    (
        lambda c: c.enable_unified_cache_external_linker,
        "--enable-unified-cache-external-linker would store rows with holes: remove it",
    ),
    (
        lambda c: c.disaggregation_mode != "null",
        "--disaggregation-mode moves rows with holes between servers: remove it",
    ),
    (lambda c: c.speculative_algorithm, "--speculative-algorithm allocates past the committed length: remove it"),
    (lambda c: c.enable_hisparse, "--enable-hisparse keeps its own map of slots: remove it"),
    (lambda c: c.dllm_algorithm, "--dllm-algorithm rewrites tokens that were already scored: remove it"),
    (lambda c: c.enable_streaming_session, "--enable-streaming-session keeps rows outside the radix tree: remove it"),
    (lambda c: c.enable_session_radix_cache, "--enable-session-radix-cache is SGLang's own session store: remove it"),
    (lambda c: c.enable_unified_memory, "--enable-unified-memory moves slots behind the ledger: remove it"),
    (lambda c: c.enable_kv_cache_sharding, "--enable-kv-cache-sharding spreads one row over ranks: remove it"),
    (lambda c: c.dcp_size > 1, "--dcp-size above 1 spreads one row over ranks: set it to 1"),
    (lambda c: c.attn_cp_size > 1, "--attn-cp-size above 1 spreads one row over ranks: set it to 1"),
    (lambda c: c.pp_size > 1, "--pp-size above 1: each stage sees only some layers' scores; set it to 1"),
    (
        lambda c: c.attn_dp_size > 1 or c.enable_dp_attention,
        "--attn-dp-size above 1 deals heads and vocabulary out differently, not proved yet: use --dp-size and --tp-size",
    ),
    (lambda c: c.enable_layernorm_sp, "--enable-layernorm-sp leaves a rank only some tokens' hidden states: remove it"),
    (
        lambda c: c.enable_attn_tp_input_scattered,
        "--enable-attn-tp-input-scattered leaves a rank only some tokens' hidden states: remove it",
    ),
    (lambda c: c.enable_pdmux, "--enable-pdmux splits a prefill over forwards: remove it"),
    (lambda c: c.enable_two_batch_overlap, "--enable-two-batch-overlap splits batches behind the observer: remove it"),
    (lambda c: c.disable_radix_cache, "--disable-radix-cache leaves nowhere to keep a session: remove it"),
    (lambda c: c.kv_events_config, "--kv-events-config would publish private keys as token ids: remove it"),
    (
        lambda c: c.kv_canary not in (None, "none"),
        "--kv-canary expects every tree node to start at position 0: remove it",
    ),
    (lambda c: c.enable_return_routed_experts, "--enable-return-routed-experts reads dropped rows: remove it"),
    (lambda c: c.is_embedding, "--is-embedding: an embedding model has no session to prune; remove --enable-intentkv"),
    (lambda c: c.skip_tokenizer_init, "--skip-tokenizer-init hides the message boundaries: remove it"),
    (
        lambda c: c.tokenizer_worker_num > 1,
        "--tokenizer-worker-num above 1 starts workers without plug-ins: set it to 1",
    ),
    (lambda c: c.enable_mixed_chunk, "--enable-mixed-chunk has not been proved yet: remove it"),
    (
        lambda c: c.enable_mis,
        "--enable-mis places items by prefix length, which live rows shorten: remove it",
    ),
    (
        lambda c: c.cuda_graph_config is not None and c.cuda_graph_config.prefill.backend == "full",
        "a full prefill CUDA graph hides the queries that are scored: leave the prefill graph at its default, breakable",
    ),
    (
        lambda c: envs.SGLANG_ENABLE_METADATA_GLUE_GRAPH.get(),
        "SGLANG_ENABLE_METADATA_GLUE_GRAPH would record one set of live rows for good: unset it",
    ),
    (
        lambda c: c.enable_torch_compile,
        "--enable-torch-compile compiles hooked layers, which has not been proved yet: remove it",
    ),
    (
        lambda c: envs.SGLANG_USE_HND_KVCACHE.get(),
        "SGLANG_USE_HND_KVCACHE puts heads between the slots of a page, where keys are scored and moved by slot: unset it",
    ),
    (
        lambda c: (c.page_size or 1) > 1 and envs.SGLANG_DEBUG_MEMORY_POOL.get(),
        "SGLANG_DEBUG_MEMORY_POOL expects each token in its own place of a page, and survivors are packed: unset it",
    ),
    (lambda c: c.strip_thinking_cache, "--strip-thinking-cache cuts rows behind the ledger: remove it"),
)


def all_refusals() -> list[str]:
    """What no server starts with, one line each; models and attention backends are judged one by one."""
    return [reason for _, reason in _RULES]


def reasons_against(config: Any, *, resolved: bool = False) -> list[str]:
    """Reasons in the server arguments; `resolved` also looks at what SGLang chooses when nothing was asked for."""
    reasons = [reason for rule, reason in _RULES if rule(config)]
    if config.radix_cache_backend not in (None, "intentkv"):
        reasons.append(f"--radix-cache-backend {config.radix_cache_backend} takes the place of intentkv's: remove it")
    asked = {
        "--attention-backend": config.attention_backend,
        "--prefill-attention-backend": config.prefill_attention_backend,
        "--decode-attention-backend": config.decode_attention_backend,
    }
    for flag, backend in asked.items():
        if backend is None and not (resolved and flag == "--attention-backend"):
            continue
        if backend not in ATTENTION_BACKENDS:
            reasons.append(
                f"{flag} {backend} does not read live views, so dropped tokens would be read: "
                f"use one of {', '.join(ATTENTION_BACKENDS)}"
            )
    return reasons


def reasons_against_model(server_args: Any) -> list[str]:
    """Reasons in the model's configuration, read from its files; no weights are loaded."""
    from sglang.srt.arg_groups.model_override_base import model_config_of
    from sglang.srt.configs.model_config import AttentionArch
    from sglang.srt.mem_cache.kv_cache_builder import uses_ssm_state

    model = model_config_of(server_args)
    name = ", ".join(model.hf_config.architectures or ["the model"])
    reasons = []
    if model.attention_arch != AttentionArch.MHA:
        reasons.append(
            f"{name} keeps {model.attention_arch.name} state, not one key per head and token: not supported yet"
        )
    elif uses_ssm_state(model):
        reasons.append(f"{name} keeps recurrent state beside its keys, which cannot forget a token: not supported")
    elif model.v_head_dim != model.head_dim and server_args.page_size > 1:
        reasons.append(f"{name} has values of another size than keys, which are not moved together: set --page-size 1")
    if model.is_hybrid_swa or model.sliding_window_size:
        reasons.append(f"{name} has sliding-window layers, whose windows count positions: not supported yet")
    if model.is_local_attention_model:
        reasons.append(f"{name} attends in chunks, which count positions: not supported yet")
    if model.is_encoder_decoder:
        reasons.append(f"{name} reads an encoder's keys too, which no session owns: not supported")
    if not model.is_generation:
        reasons.append(f"{name} does not generate text: there is no session to prune")
    return reasons


def reasons_against_ranks(server_args: Any, scorer: str) -> list[str]:
    """Reasons in how the model's heads are spread over the ranks."""
    from sglang.srt.arg_groups.model_override_base import model_config_of
    from sglang.srt.arg_groups.overrides import resolved_view

    kv_heads = model_config_of(server_args).get_total_num_kv_heads()
    problem = groups_problem(scorer, kv_heads, resolved_view(server_args).tp_size)
    return [f"--intentkv-scorer {scorer}: {problem}"] if problem else []


def groups_problem(scorer: str, kv_heads: int, ranks: int) -> str | None:
    """Why `ranks` ranks cannot rank tokens by a scorer, None if they can: some share one of `kv_heads` KV heads, and no sum
    over them is what one rank would get from all of that head's query heads."""
    if scorer not in WHOLE_GROUPS or ranks <= kv_heads:
        return None
    return (
        f"{ranks} ranks share {kv_heads} KV heads, and it needs all query heads of one together: "
        f"use --tp-size {kv_heads} or less, or another scorer"
    )


def reasons_against_head(server_args: Any, head: str) -> list[str]:
    """Reasons in a residual head's file: it cannot be read, or it was made for another model."""
    from sglang.srt.arg_groups.model_override_base import model_config_of

    from intentkv.score.head.identity import ModelIdentity
    from intentkv.score.head.io import load_head

    model = model_config_of(server_args)
    try:
        _, info = load_head(Path(head))
    except SettingsError as error:
        return [f"--intentkv-head {reason}" for reason in error.reasons]
    served = ModelIdentity.of(str(model.model_path), model.hf_config)
    return [f"--intentkv-head {head}: {reason}" for reason in info.model.reasons_against(served)]
