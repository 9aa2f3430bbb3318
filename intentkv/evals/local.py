"""SmolLM2 in this process, without a server: how well it does with nothing dropped, and how long a text is in its tokens."""

from pathlib import Path
from typing import Any

import torch

from intentkv.evals.sessions import Message


class LocalModel:
    """Greedy answers in float32, with one KV cache that is reused as far as the next prompt begins like the last one.

    float32, because on a CPU without bf16 instructions it is eight times faster than bf16.
    """

    def __init__(self, folder: Path) -> None:
        from transformers import AutoModelForCausalLM, AutoTokenizer, DynamicCache

        self._tokenizer: Any = AutoTokenizer.from_pretrained(folder)
        self._model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
        self._cache: Any = DynamicCache()
        self._cached: list[int] = []  # the tokens whose KV the cache holds

    def tokens(self, messages: list[Message], generation_prompt: bool = True) -> list[int]:
        """The token ids of `messages` in the model's chat template."""
        ids = self._tokenizer.apply_chat_template(
            messages, tokenize=True, return_dict=False, add_generation_prompt=generation_prompt
        )
        return [int(token) for token in ids]

    def answer(self, messages: list[Message], max_tokens: int, stop: str | None) -> str:
        """What the model says at temperature 0: up to its end of turn, or to a token with `stop`, which it then ends with."""
        prompt = self.tokens(messages)
        same = 0
        while same < min(len(prompt) - 1, len(self._cached)) and prompt[same] == self._cached[same]:
            same += 1
        self._cache.crop(same - len(self._cached))  # how many to remove, as a negative number
        self._cached = prompt[:same]
        fresh, said = prompt[same:], []
        with torch.inference_mode():
            for _ in range(max_tokens):
                token = self._next(fresh)
                if token == self._tokenizer.eos_token_id:
                    break
                said.append(token)
                fresh = [token]
                if stop is not None and stop in self._tokenizer.decode(fresh):
                    break
        return str(self._tokenizer.decode(said, skip_special_tokens=True))

    def _next(self, fresh: list[int]) -> int:
        """Adds `fresh` to the cache and returns the most likely token after it."""
        logits = self._model(torch.tensor([fresh]), past_key_values=self._cache, logits_to_keep=1).logits
        self._cached += fresh
        return int(logits[0, -1].argmax())
