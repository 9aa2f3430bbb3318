"""Session-aware KV cache pruning for SGLang."""

from intentkv.plugin import enable

__version__ = "0.1.0"
__all__ = ["__version__", "enable"]
