"""A tokenizer and a model as far as the runtime looks into them."""

from __future__ import annotations

import torch
from tokenizers import Tokenizer, models
from transformers import PreTrainedTokenizerFast

WORDS = ["a", "b.", " c", "\n", "}", "{"]


def small_tokenizer() -> PreTrainedTokenizerFast:
    """A tokenizer of a few words, without a chat template."""
    vocabulary = {word: i for i, word in enumerate(WORDS)}
    return PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.WordLevel(vocabulary, unk_token="a")))


class Model(torch.nn.Module):
    """What the runtime looks for in a model: an attention layer and a head."""

    def __init__(self, layer: torch.nn.Module) -> None:
        super().__init__()
        self.layer, self.lm_head = layer, torch.nn.Linear(4, 50, bias=False)
