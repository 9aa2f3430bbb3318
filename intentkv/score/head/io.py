"""The residual head's file: safetensors with metadata that say what it was made for, and how."""

import dataclasses
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor

from intentkv.checks import as_int, shown
from intentkv.errors import SettingsError
from intentkv.score.head.identity import ModelIdentity
from intentkv.score.head.model import ResidualHead

FORMAT = "intentkv-residual-head"
LARGEST = 65_536  # of D and of counts of layers and heads; many times what any model has
VERSION = 1  # raise when the head's inputs or layers change; the published head stays 1


@dataclass(frozen=True)
class HeadInfo:
    """What a head's file says of it.

    Attributes:
        model: the model it was trained for.
        data_hash: SHA-256 of the training shards.
        seed: of the training run.
        command: the command line that made it.
        metrics: figures of the run, by name.
    """

    model: ModelIdentity
    data_hash: str
    seed: int
    command: str
    metrics: Mapping[str, float]


def save_head(path: Path, head: ResidualHead, info: HeadInfo) -> None:
    """Write `head` and `info` to `path`, whole or not at all. Raises ValueError if a weight is not finite."""
    tensors = {name: value.detach().cpu().contiguous() for name, value in head.state_dict().items()}
    bad = [name for name, value in tensors.items() if not torch.isfinite(value).all()]
    if bad:
        raise ValueError(f"save_head: expected finite weights, got NaN or infinity in {', '.join(bad)}")
    metadata = {
        "format": FORMAT,
        "version": str(VERSION),
        **{name: str(value) for name, value in dataclasses.asdict(info.model).items()},
        "data_hash": info.data_hash,
        "seed": str(info.seed),
        "command": info.command,
        "metrics": json.dumps(dict(info.metrics)),
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_name(path.name + ".part")
    unfinished.write_bytes(save(tensors, metadata))  # not save_file, which makes files that only their owner may read
    unfinished.replace(path)


def load_head(path: Path) -> tuple[ResidualHead, HeadInfo]:
    """Read a head, on the CPU in float32. Raises SettingsError with every reason why the file cannot be used."""
    try:
        with safe_open(path, framework="pt") as file:
            metadata = file.metadata() or {}
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (not a dict)
    except (OSError, SafetensorError) as error:
        raise SettingsError(
            [f"{path}: expected a whole .safetensors file, cannot read it: {str(error)[:200]}"]
        ) from None
    reasons: list[str] = []
    info = _read_info(metadata, reasons)
    head = ResidualHead(_head_dim(tensors) if info is None else info.model.head_dim)
    _check_tensors(tensors, head.state_dict(), reasons)
    if info is None or reasons:
        raise SettingsError([f"{path}: {reason}" for reason in reasons])
    head.load_state_dict(tensors)
    return head, info


def _read_info(metadata: Mapping[str, str], reasons: list[str]) -> HeadInfo | None:
    """The metadata, or None and why not in `reasons`."""
    if metadata.get("format") != FORMAT:
        reasons.append(
            f"expected metadata with format {FORMAT!r}, got {shown(metadata.get('format'))}: not a head made by "
            "scripts/train_residual_head.py"
        )
        return None
    if metadata.get("version") != str(VERSION):
        reasons.append(
            f"expected format version {VERSION}, got {shown(metadata.get('version'))}: train the head again, or use the "
            "intentkv that wrote it"
        )
        return None
    numbers = ("head_dim", "layers", "heads", "kv_heads")
    texts = ("model_id", "config_hash", "data_hash", "command")
    for name, least, most in [*((name, 1, LARGEST) for name in numbers), ("seed", 0, 2**64)]:
        number = as_int(metadata.get(name))
        if number is None or not least <= number <= most:
            reasons.append(
                f"metadata {name}: expected a whole number from {least} to {most}, got {shown(metadata.get(name))}"
            )
    reasons.extend(f"metadata {name}: expected a text, got none" for name in texts if not metadata.get(name))
    metrics: object = None
    try:
        metrics = json.loads(metadata.get("metrics", ""))
    except (ValueError, RecursionError):
        pass  # said below: it is no object then either
    if not isinstance(metrics, dict) or not all(isinstance(value, int | float) for value in metrics.values()):
        reasons.append(f"metadata metrics: expected a JSON object of numbers, got {shown(metadata.get('metrics'))}")
        metrics = {}
    if reasons:
        return None
    model = ModelIdentity(
        model_id=metadata["model_id"],
        config_hash=metadata["config_hash"],
        **{name: int(metadata[name]) for name in numbers},
    )
    return HeadInfo(model, metadata["data_hash"], int(metadata["seed"]), metadata["command"], metrics)


def _head_dim(tensors: Mapping[str, Tensor]) -> int:
    """D by the tensors, for want of metadata, so that the tensors can be checked all the same."""
    keys = tensors.get("key.weight")
    return keys.shape[1] if keys is not None and keys.ndim == 2 and 0 < keys.shape[1] <= LARGEST else 1


def _check_tensors(tensors: Mapping[str, Tensor], expected: Mapping[str, Tensor], reasons: list[str]) -> None:
    for name in sorted(expected.keys() | tensors.keys()):
        if name not in tensors:
            reasons.append(f"tensor {name} {list(expected[name].shape)} is missing")
        elif name not in expected:
            reasons.append(f"tensor {name} {list(tensors[name].shape)} does not belong to a head of version {VERSION}")
        elif tensors[name].shape != expected[name].shape or tensors[name].dtype != torch.float32:
            reasons.append(
                f"tensor {name}: expected float32 {list(expected[name].shape)}, "
                f"got {str(tensors[name].dtype).removeprefix('torch.')} {list(tensors[name].shape)}"
            )
        elif not torch.isfinite(tensors[name]).all():
            reasons.append(f"tensor {name}: expected finite numbers, got NaN or infinity")
