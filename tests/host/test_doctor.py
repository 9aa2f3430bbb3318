"""`intentkv doctor`: what it says of this machine, of a model, and of flags that no server would start with."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from intentkv.config import Settings, settings_from_kwargs
from intentkv.engine.inventory import load_rows
from intentkv.engine.memory_estimate import estimate, examine_memory, read_shape
from intentkv.evals.model import tiny_checkpoint


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_checkpoint(tmp_path_factory.mktemp("models") / "tiny")


def doctor(*arguments: str, **environment: str) -> tuple[int, str]:
    """A process of its own: examining flags activates the plug-in."""
    result = subprocess.run(
        [sys.executable, "-W", "ignore", "-m", "intentkv.cli", "doctor", *arguments],
        env={**os.environ, "HF_HUB_OFFLINE": "1", "COLUMNS": "200", **environment},
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert result.returncode in (0, 1), result.stderr[-3000:]
    return result.returncode, result.stdout


def verdict(*flags: str, **environment: str) -> tuple[int, dict[str, Any]]:
    status, text = doctor("--json", "--", *flags, **environment)
    return status, json.loads(text.strip().splitlines()[-1])


def test_doctor_says_yes_with_everything_a_script_needs(model: Path) -> None:
    flags = ("--max-total-tokens", "65536", "--context-length", "16384", "--intentkv-budget", "25%")
    status, said = verdict("--model-path", str(model), "--device", "cpu", *flags)
    assert (status, said["can_serve"], said["reasons"]) == (0, True, [])
    assert set(said["hooks"]) == {row.target for row in load_rows()}
    assert set(said["hooks"].values()) == {"fits"}
    assert said["sglang_range"].endswith("hooks pinned for 0.5.23") and ">=0.5.23" in said["sglang_range"]
    assert said["versions"]["sglang"] == "0.5.23" and said["environment"]["python"].startswith("3.")
    assert said["model"] == {
        "architecture": "LlamaForCausalLM", "layers": 2, "kv_heads": 2, "head_dim": 32, "context": 32768,
        "bytes_per_token": 2 * 2 * 2 * 32 * 2,
    }  # fmt: skip
    live = 64 + (16384 - 64) // 4 + 511
    assert said["memory"]["live_tokens"] == live
    assert (said["memory"]["agents_stock"], said["memory"]["agents_intentkv"]) == (4, 65536 // live)


def test_doctor_lists_every_reason_and_still_estimates(model: Path) -> None:
    flags = (
        "--model-path",
        str(model),
        "--device",
        "cpu",
        "--attention-backend",
        "torch_native",
        "--kv-canary",
        "raise",
    )
    status, said = verdict(*flags, "--max-total-tokens", "65536")
    assert status == 1 and not said["can_serve"]
    assert any("--attention-backend torch_native" in reason for reason in said["reasons"])
    assert any("--kv-canary" in reason for reason in said["reasons"]) and len(said["reasons"]) == 2
    assert said["memory"]["agents_stock"] == 2


def test_doctor_for_people() -> None:
    status, text = doctor()
    assert status == 0 and "can serve: start with --enable-intentkv" in text
    for said in ("SGLang wanted", "managers.scheduler.Scheduler.__init__", "memory: no --model-path was given"):
        assert said in text
    assert "refused with any model:" in text and "--enable-lmcache" in text


def test_doctor_sees_a_whitelist_that_leaves_it_out() -> None:
    status, said = verdict(SGLANG_PLUGINS="others")
    assert status == 1
    assert said["reasons"] == ["SGLANG_PLUGINS=others leaves intentkv out: add it, or unset the variable"]


class TestDoctorsEstimate:
    def test_a_budget_larger_than_the_session_changes_nothing(self) -> None:
        told = estimate(Settings(), 4096, 65536, "")
        assert (told.agents_stock, told.agents_intentkv, told.live_tokens) == (16, 16, 4096)

    def test_mask_frees_nothing(self) -> None:
        settings = settings_from_kwargs(budget="10%", layout="mask")
        assert estimate(settings, 16384, 65536, "").agents_intentkv == 4

    def test_shapes_of_other_config_files(self, tmp_path: Path) -> None:
        file = tmp_path / "config.json"
        base = {"num_hidden_layers": 4, "num_attention_heads": 8, "max_position_embeddings": 100}
        file.write_text(json.dumps({**base, "hidden_size": 64, "torch_dtype": "float32"}))
        assert read_shape(tmp_path).bytes_per_token == 2 * 4 * 8 * 8 * 4
        assert read_shape(tmp_path, "fp8_e4m3").bytes_per_token == 2 * 4 * 8 * 8
        file.write_text(
            json.dumps({"architectures": ["X"], "text_config": {**base, "head_dim": 16, "num_key_value_heads": 2}})
        )
        shape = read_shape(tmp_path)
        assert (shape.architecture, shape.kv_heads, shape.bytes_per_token) == ("X", 2, 2 * 4 * 2 * 16 * 2)

    @pytest.mark.parametrize("content", [None, "{", "{}", "[]"])
    def test_a_config_that_does_not_tell_is_said(self, tmp_path: Path, content: str | None) -> None:
        if content is not None:
            (tmp_path / "config.json").write_text(content)
        model, memory, note = examine_memory(["--model-path", str(tmp_path)])
        assert model is None and memory is None and note.startswith("no memory estimate: ")
        assert examine_memory(["--model", "no/such-model"])[2].endswith("is no folder and not in the hub's cache")
