"""A residual head that was never trained, for tests that need any."""

from pathlib import Path

from intentkv.score.head.identity import ModelIdentity
from intentkv.score.head.io import HeadInfo, save_head
from intentkv.score.head.model import ResidualHead


def untrained_head(folder: Path, head_dim: int) -> str:
    """The path of its file in `folder`."""
    path = folder / f"untrained-{head_dim}.safetensors"
    model = ModelIdentity("any", "0" * 64, head_dim=head_dim, layers=1, heads=1, kv_heads=1)
    save_head(path, ResidualHead(head_dim), HeadInfo(model, "0" * 64, seed=0, command="none", metrics={}))
    return str(path)
