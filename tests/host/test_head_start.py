"""A residual head at server start: one that fits is served, any other stops the start with every reason."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
import torch

from intentkv.evals.model import tiny_checkpoint
from intentkv.score.head.identity import ModelIdentity
from intentkv.score.head.io import HeadInfo, save_head
from intentkv.score.head.model import ResidualHead


def write_head(path: Path, identity: ModelIdentity) -> Path:
    torch.manual_seed(0)
    head = ResidualHead(identity.head_dim)
    torch.nn.init.normal_(head.output.weight)
    save_head(path, head, HeadInfo(identity, "d" * 64, 0, "test", {}))
    return path


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_checkpoint(tmp_path_factory.mktemp("model"))


def dry_start(model: Path, *flags: str) -> list[str]:
    """The reasons of a start up to the loading of weights, in a process of its own."""
    code = f"""
        import json
        from intentkv.engine.doctor import examine
        print(json.dumps(examine({["--model-path", str(model), *flags]!r}).reasons))
    """
    result = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", textwrap.dedent(code)],
        env={**os.environ, "HF_HUB_OFFLINE": "1"},
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert result.returncode == 0, result.stderr[-3000:]
    reasons: list[str] = json.loads(result.stdout.strip().splitlines()[-1])
    return reasons


def identity_of(model: Path) -> ModelIdentity:
    from transformers import AutoConfig

    return ModelIdentity.of("trained-on", AutoConfig.from_pretrained(model))


def test_a_head_that_fits_is_served(model: Path, tmp_path: Path) -> None:
    head = write_head(tmp_path / "head.safetensors", identity_of(model))
    assert dry_start(model, "--intentkv-head", str(head)) == []


def test_another_models_head_stops_the_start_beside_other_reasons(model: Path, tmp_path: Path) -> None:
    other = ModelIdentity("other-model", "c" * 64, head_dim=64, layers=2, heads=9, kv_heads=2)
    head = write_head(tmp_path / "head.safetensors", other)
    assert dry_start(model, "--intentkv-head", str(head)) == [
        f"--intentkv-head {head}: it was trained for other-model with D = 64, and {model} has 32",
        f"--intentkv-head {head}: it was trained for other-model with query heads = 9, and {model} has 4",
    ]


def test_a_damaged_head_stops_the_start(model: Path, tmp_path: Path) -> None:
    head = write_head(tmp_path / "head.safetensors", identity_of(model))
    head.write_bytes(head.read_bytes()[:-4])
    (reason,) = dry_start(model, "--intentkv-head", str(head))
    assert reason.startswith(f"--intentkv-head {head}: expected a whole .safetensors file, cannot read it: ")
