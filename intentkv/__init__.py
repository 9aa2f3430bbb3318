"""Session-aware KV cache pruning for SGLang."""

__version__ = "0.1.0"
