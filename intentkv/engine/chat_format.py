"""What the served model's tokenizer says: message boundaries, by the chat template that SGLang itself uses, and segments."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

from intentkv.observe.messages import MessageFormat
from intentkv.observe.segments import TokenMarks

logger = logging.getLogger(__name__)

RAW = "every prompt is read as raw text, whose system prefix is its first tokens and whose question is its end"


def jinja_template(tokenizer: Any, chat_template: str | None) -> str | None:
    """The Jinja text in force, or None; arguments as of `message_format`."""
    if chat_template is None:
        return getattr(tokenizer, "chat_template", None)
    path = Path(chat_template)
    return path.read_text(encoding="utf-8") if path.suffix == ".jinja" and path.is_file() else None


def message_format(tokenizer: Any, chat_template: str | None) -> MessageFormat | None:
    """The message format of the served model, or None where only raw prompts can be read.

    Args:
        tokenizer: the scheduler's tokenizer. chat_template: the value of `--chat-template`, a Jinja file or the name of
            a conversation template built into SGLang (whose boundaries cannot be derived).
    """
    template = jinja_template(tokenizer, chat_template)
    if template is None:
        logger.warning("intentkv found no Jinja chat template: %s", RAW)
        return None

    def render(messages: list[dict]) -> str:
        return tokenizer.apply_chat_template(messages, tokenize=False, chat_template=template)

    def encode(text: str) -> list[int]:
        return tokenizer.encode(text, add_special_tokens=False)

    try:
        return MessageFormat.from_chat_template(render, encode)
    except ValueError as error:
        logger.warning("intentkv cannot read the chat template (%s): %s", error, RAW)
        return None


def token_marks(tokenizer: Any) -> TokenMarks:
    """Where segments end, for every token of the vocabulary; takes about a second for 150,000 of them."""

    def text(token: int) -> str:
        # Decoded alone, many tokenizers strip the space that begins a word.
        raw = tokenizer.convert_ids_to_tokens(token) or ""
        decoded = tokenizer.decode([token])
        return " " + decoded if raw[:1] in ("\u0120", "\u2581") and not decoded[:1].isspace() else decoded

    return TokenMarks.from_decoder(text, len(tokenizer), tokenizer.all_special_ids)
