"""SGLang has one sampling observer a model runner; this one hands logits and sampled tokens on to all of ours."""

from __future__ import annotations

from typing import Any, Protocol

from torch import Tensor


class Part(Protocol):
    """As SGLang's own contract for a sampling observer; at most one part gives output for the host."""

    def is_active(self, sampling_info: Any) -> bool: ...

    def before_grammar(self, logits: Tensor, sampling_info: Any) -> Any: ...

    def after_sample(self, state: Any, token_ids: Tensor) -> Any: ...


class SamplingObservers:
    """Active when a part is; `parts` may be added to while serving."""

    def __init__(self, *parts: Part) -> None:
        self.parts = list(parts)

    def is_active(self, sampling_info: Any) -> bool:
        return any(part.is_active(sampling_info) for part in self.parts)

    def before_grammar(self, logits: Tensor, sampling_info: Any) -> list[tuple[Part, Any]]:
        return [
            (part, part.before_grammar(logits, sampling_info)) for part in self.parts if part.is_active(sampling_info)
        ]

    def after_sample(self, state: list[tuple[Part, Any]], token_ids: Tensor) -> Any:
        told = [part.after_sample(seen, token_ids) for part, seen in state]
        return next((output for output in told if output is not None), None)
