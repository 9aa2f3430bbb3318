"""How models write tool calls: the names of the templates known here, and a user's own pattern."""

from typing import Final

from intentkv import checks

TEMPLATES: Final = ("auto", "hermes", "harmony", "llama", "answer")


def markers_of(pattern: str) -> tuple[str, str]:
    """The two literal markers of a user's pattern `OPEN...CLOSE`, in which `\\n` stands for a line break.

    Raises:
        ValueError: it is none.
    """
    opening, dots, closing = pattern.replace("\\n", "\n").partition("...")
    if not dots or not 1 <= len(opening) <= 60 or not 1 <= len(closing) <= 60:
        raise ValueError(
            f"expected one of {', '.join(TEMPLATES)}, or OPEN...CLOSE with two markers of 1 to 60 characters, "
            f"got {checks.shown(pattern)}"
        )
    return opening, closing


def template_of(chat_template: str | None) -> str | None:
    """The name of the call template that a tokenizer's Jinja chat template writes, or None where none is known."""
    text = chat_template or ""
    if "<|call|>" in text and "<|channel|>" in text:
        return "harmony"
    if "<tool_call>" in text:
        return "hermes"
    if "<|python_tag|>" in text or ("ipython" in text and '"parameters"' in text):
        return "llama"
    return None
