"""Every refusal by a flag or a kind of model, by SGLang's own parser and configuration; none for a plain start."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from types import SimpleNamespace

import pytest
from sglang.srt.arg_groups import model_override_base
from sglang.srt.configs.model_config import ModelConfig
from sglang.srt.server_args import ServerArgs

from intentkv.engine.support import all_refusals, groups_problem, reasons_against, reasons_against_model
from intentkv.score.registry import SCORERS, WHOLE_GROUPS

FLAGS = {
    "--enable-hierarchical-cache": "copies rows with holes to the host",
    "--enable-lmcache": "replaces the radix cache",
    "--enable-flexkv": "replaces the radix cache",
    "--enable-unified-cache-external-linker": "would store rows with holes",
    "--disaggregation-mode prefill": "moves rows with holes",
    "--disaggregation-mode decode": "moves rows with holes",
    "--speculative-algorithm EAGLE": "allocates past the committed length",
    "--enable-hisparse": "its own map of slots",
    "--dllm-algorithm LowConfidence": "rewrites tokens",
    "--enable-streaming-session": "rows outside the radix tree",
    "--enable-session-radix-cache": "SGLang's own session store",
    "--enable-unified-memory": "behind the ledger",
    "--dcp-size 2": "spreads one row over ranks",
    "--attn-cp-size 2": "spreads one row over ranks",
    "--pp-size 2": "some layers' scores",
    "--attn-dp-size 2": "not proved yet",
    "--enable-layernorm-sp": "only some tokens'",
    "--enable-attn-tp-input-scattered": "only some tokens'",
    "--enable-pdmux": "splits a prefill",
    "--enable-two-batch-overlap": "behind the observer",
    "--disable-radix-cache": "nowhere to keep a session",
    "--kv-events-config {}": "private keys as token ids",
    "--kv-canary raise": "start at position 0",
    "--enable-return-routed-experts": "reads dropped rows",
    "--is-embedding": "no session to prune",
    "--skip-tokenizer-init": "message boundaries",
    "--tokenizer-worker-num 2": "workers without plug-ins",
    "--enable-mixed-chunk": "has not been proved",
    "--enable-mis": "live rows shorten",
    "--enable-torch-compile": "compiles hooked layers",
    "--strip-thinking-cache": "cuts rows",
}


@pytest.fixture(scope="module")
def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser()
    ServerArgs.add_cli_args(made)
    return made


def reasons(parser: argparse.ArgumentParser, flags: str) -> list[str]:
    given = parser.parse_args(["--model-path", "m", *flags.split()])
    given.cuda_graph_config = None  # made of other flags when the arguments are resolved
    return reasons_against(given)


def test_refusals_spare_a_plain_start(parser: argparse.ArgumentParser) -> None:
    assert reasons(parser, "") == []


@pytest.mark.parametrize("flags", FLAGS)
def test_refusals_name_the_flag_and_the_reason(parser: argparse.ArgumentParser, flags: str) -> None:
    (reason,) = reasons(parser, flags)
    assert reason in all_refusals()
    assert reason.startswith(flags.split()[0]) and FLAGS[flags] in reason


@pytest.mark.parametrize(
    ("variable", "flags"), [("SGLANG_USE_HND_KVCACHE", ""), ("SGLANG_DEBUG_MEMORY_POOL", "--page-size 16")]
)
def test_refusals_by_the_environment(
    parser: argparse.ArgumentParser, variable: str, flags: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert reasons(parser, flags) == []
    monkeypatch.setenv(variable, "1")
    (reason,) = reasons(parser, flags)
    assert reason in all_refusals() and reason.startswith(variable)


SHAPE = {
    "vocab_size": 100, "hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 4, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 4096, "torch_dtype": "bfloat16",
}  # fmt: skip
SLIDING = ["sliding_attention", "full_attention"] * 2
LATENT = {"kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 16, "q_lora_rank": None}
MODELS = {
    "GptOssForCausalLM": ({"model_type": "gpt_oss", "sliding_window": 128, "layer_types": SLIDING}, "sliding-window"),
    "Gemma2ForCausalLM": ({"model_type": "gemma2", "sliding_window": 128, "head_dim": 16}, "sliding-window"),
    "Qwen3NextForCausalLM": ({"model_type": "qwen3_next"}, "recurrent state"),
    "DeepseekV2ForCausalLM": ({"model_type": "deepseek_v2", **LATENT}, "MLA state"),
    "LlamaForCausalLM": ({"model_type": "llama"}, None),
    "Qwen3ForCausalLM": ({"model_type": "qwen3", "head_dim": 16, "v_head_dim": 32}, "values of another size"),
}


@pytest.mark.parametrize("architecture", MODELS)
def test_refusals_of_models(architecture: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    own, said = MODELS[architecture]
    (tmp_path / "config.json").write_text(json.dumps({**SHAPE, "architectures": [architecture], **own}))
    model = ModelConfig(model_path=str(tmp_path))
    monkeypatch.setattr(model_override_base, "model_config_of", lambda server_args: model)
    found = reasons_against_model(SimpleNamespace(page_size=16))
    if said is None:
        assert found == []
    else:
        (reason,) = found
        assert reason.startswith(architecture) and said in reason


@pytest.mark.parametrize("scorer", SCORERS)
def test_refusals_of_tp_where_ranks_share_a_kv_head(scorer: str) -> None:
    assert groups_problem(scorer, kv_heads=4, ranks=4) is None
    problem = groups_problem(scorer, kv_heads=4, ranks=8)
    if scorer in WHOLE_GROUPS:
        assert problem is not None and "8 ranks share 4 KV heads" in problem and "--tp-size 4" in problem
    else:
        assert problem is None
