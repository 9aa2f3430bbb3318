"""The head's file: what it says, and everything that is wrong with a bad one."""

import dataclasses
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from intentkv.config import Settings
from intentkv.errors import SettingsError
from intentkv.evals.model import tiny_checkpoint
from intentkv.score.head.identity import ModelIdentity
from intentkv.score.head.io import HeadInfo, load_head, save_head
from intentkv.score.head.model import ResidualHead
from intentkv.score.registry import make_scorer

MODEL = ModelIdentity("small-model", "a" * 64, head_dim=16, layers=3, heads=4, kv_heads=2)
INFO = HeadInfo(MODEL, data_hash="d" * 64, seed=7, command="python train.py --x 1", metrics={"recall_25%": 0.5})


@pytest.fixture
def path(tmp_path: Path) -> Path:
    torch.manual_seed(1)
    path = tmp_path / "head.safetensors"
    save_head(path, ResidualHead(16), INFO)
    return path


def rewrite(path: Path, change: Callable[[dict[str, Tensor], dict[str, str]], None]) -> None:
    with safe_open(path, framework="pt") as file:
        tensors, metadata = {name: file.get_tensor(name) for name in file.keys()}, dict(file.metadata())  # noqa: SIM118
    change(tensors, metadata)
    save_file(tensors, path, metadata)


def refusal(path: Path) -> tuple[str, ...]:
    with pytest.raises(SettingsError) as caught:
        load_head(path)
    assert all(reason.startswith(f"{path}: ") for reason in caught.value.reasons)
    return tuple(reason.removeprefix(f"{path}: ") for reason in caught.value.reasons)


def test_what_is_saved_is_what_is_loaded(path: Path) -> None:
    torch.manual_seed(1)
    saved = ResidualHead(16).state_dict()
    head, info = load_head(path)
    assert info == INFO
    assert all(torch.equal(saved[name], value) for name, value in head.state_dict().items())
    assert make_scorer("intent-head", Settings(head=str(path))).name == "intent-head"


def test_the_metadata_name_all_that_made_it(path: Path) -> None:
    with safe_open(path, framework="pt") as file:
        metadata = file.metadata()
    assert (metadata["format"], metadata["version"]) == ("intentkv-residual-head", "1")
    assert set(metadata) == {
        *("format", "version", "model_id", "config_hash", "head_dim", "layers", "heads", "kv_heads"),
        *("data_hash", "seed", "command", "metrics"),
    }


@pytest.mark.parametrize(
    "content", [None, b"", b"not a tensor file at all, but long enough"], ids=["missing", "empty", "text"]
)
def test_what_is_no_safetensors_file_is_refused(tmp_path: Path, content: bytes | None) -> None:
    path = tmp_path / "bad.safetensors"
    if content is not None:
        path.write_bytes(content)
    (reason,) = refusal(path)
    assert reason.startswith("expected a whole .safetensors file, cannot read it: ")


@pytest.mark.parametrize("kept", [0.999, 0.5, 0.01])
def test_a_truncated_file_is_refused(path: Path, kept: float) -> None:
    whole = path.read_bytes()
    path.write_bytes(whole[: int(len(whole) * kept)])
    (reason,) = refusal(path)
    assert reason.startswith("expected a whole .safetensors file, cannot read it: ")


def test_some_other_safetensors_file_is_refused(path: Path) -> None:
    save_file({"weight": torch.ones(2)}, path)
    reasons = refusal(path)
    assert reasons[0].startswith("expected metadata with format 'intentkv-residual-head', got None")
    assert "tensor weight [2] does not belong to a head of version 1" in reasons
    assert any(reason.startswith("tensor output.weight [1, 256] is missing") for reason in reasons)


def test_a_head_of_a_later_format_is_refused(path: Path) -> None:
    rewrite(path, lambda tensors, metadata: metadata.update(version="2"))
    assert refusal(path)[0].startswith("expected format version 1, got '2'")


def test_every_fault_is_named_at_once(path: Path) -> None:
    def spoil(tensors: dict[str, Tensor], metadata: dict[str, str]) -> None:
        tensors["hidden.bias"][3] = torch.nan
        tensors["alpha"] = torch.tensor(torch.inf)
        tensors["output.bias"] = torch.zeros(1, dtype=torch.float16)
        tensors["value.weight"] = torch.zeros(128, 15)
        tensors["extra"] = torch.zeros(1)
        del tensors["key.bias"]
        metadata["seed"] = "seven"
        metadata["metrics"] = "{"
        del metadata["command"]

    rewrite(path, spoil)
    assert sorted(refusal(path)) == sorted(
        (
            "metadata seed: expected a whole number from 0 to 18446744073709551616, got 'seven'",
            "metadata command: expected a text, got none",
            "metadata metrics: expected a JSON object of numbers, got '{'",
            "tensor alpha: expected finite numbers, got NaN or infinity",
            "tensor hidden.bias: expected finite numbers, got NaN or infinity",
            "tensor output.bias: expected float32 [1], got float16 [1]",
            "tensor value.weight: expected float32 [128, 16], got float32 [128, 15]",
            "tensor extra [1] does not belong to a head of version 1",
            "tensor key.bias [128] is missing",
        )
    )


def test_a_head_that_is_not_finite_is_not_written(tmp_path: Path) -> None:
    head = ResidualHead(16)
    torch.nn.init.constant_(head.alpha, torch.nan)
    with pytest.raises(ValueError, match="finite weights, got NaN or infinity in alpha"):
        save_head(tmp_path / "head.safetensors", head, INFO)
    assert list(tmp_path.iterdir()) == []


def test_another_models_head_is_told_by_shape_and_by_configuration() -> None:
    assert MODEL.reasons_against(dataclasses.replace(MODEL, model_id="the same in another folder")) == []
    other = dataclasses.replace(MODEL, model_id="other", head_dim=64, layers=5, config_hash="b" * 64)
    assert MODEL.reasons_against(other) == [
        "it was trained for small-model with D = 16, and other has 64",
        "it was trained for small-model with layers = 3, and other has 5",
    ]
    (reason,) = MODEL.reasons_against(dataclasses.replace(MODEL, model_id="other", config_hash="b" * 64))
    assert "small-model (configuration aaaaaaaaaaaa), and other has another configuration (bbbbbbbbbbbb)" in reason


def test_a_models_identity_is_in_its_configuration(tmp_path: Path) -> None:
    from transformers import AutoConfig

    plain, normed = (
        AutoConfig.from_pretrained(tiny_checkpoint(tmp_path / kind, kind=kind)) for kind in ("llama", "qwen3")
    )
    identity = ModelIdentity.of("tiny", plain)
    assert (identity.head_dim, identity.layers, identity.heads, identity.kv_heads) == (32, 2, 4, 2)
    assert identity.config_hash != ModelIdentity.of("tiny", normed).config_hash
    plain.rope_parameters = {**plain.rope_parameters, "type": "default"}  # as SGLang writes it
    assert identity == ModelIdentity.of("tiny", plain)
    plain.rope_parameters = {**plain.rope_parameters, "rope_theta": 1.0}
    assert identity.config_hash != ModelIdentity.of("tiny", plain).config_hash
