"""Message boundaries with a real byte-pair tokenizer and its template: SmolLM2's."""

from functools import cache
from typing import Any

from hypothesis import given
from hypothesis import strategies as st
from transformers import AutoTokenizer

from intentkv.evals.model import model_path
from intentkv.observe.messages import MessageFormat

ROLES = st.sampled_from(["user", "assistant", "tool", "system"])
# White space, digits, brackets and newlines at the ends are where a tokenizer merges content and template.
CONTENTS = st.one_of(st.text(max_size=12), st.text("ab 7\n\t{}<>|\"'._[]#", max_size=12))


@cache
def tokenizer() -> Any:
    return AutoTokenizer.from_pretrained(model_path())


def encode(text: str) -> list[int]:
    ids: list[int] = tokenizer().encode(text, add_special_tokens=False)
    return ids


@cache
def message_format() -> MessageFormat:
    return MessageFormat.from_chat_template(
        lambda messages: tokenizer().apply_chat_template(messages, tokenize=False), encode
    )


@given(st.lists(st.tuples(ROLES, CONTENTS), min_size=1, max_size=6))
def test_every_message_is_found_whatever_it_says(turns: list[tuple[str, str]]) -> None:
    turns = [("system", "be brief"), ("user", "go"), *turns]
    conversation = [{"role": role, "content": content} for role, content in turns]
    ids = encode(tokenizer().apply_chat_template(conversation, tokenize=False, add_generation_prompt=True))
    *messages, generation = message_format().messages(ids)
    assert [m.role for m in messages] == [role for role, _ in turns]
    for message, (role, content) in zip(messages, turns, strict=True):
        text = tokenizer().decode(ids[message.start : message.end])
        assert text == tokenizer().decode(encode(f"<|im_start|>{role}\n{content}<|im_end|>\n"))
    assert tokenizer().decode(ids[generation.start :]) == "<|im_start|>assistant\n"


def test_the_default_system_message_is_the_system_prefix() -> None:
    text = tokenizer().apply_chat_template([{"role": "user", "content": "hello"}], tokenize=False)
    system, user = message_format().messages(encode(text))
    assert "named SmolLM" in tokenizer().decode(encode(text)[: system.end])
    assert tokenizer().decode(encode(text)[user.start :]) == "<|im_start|>user\nhello<|im_end|>\n"
