"""Which chat template the message boundaries come from, and what happens where there is none."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from intentkv.engine.chat_format import message_format
from intentkv.evals.model import model_path

OTHER = "{% for m in messages %}<|im_start|>{{ m['role'] }}: {{ m['content'] }}<|im_end|>\n{% endfor %}"


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerBase:
    return AutoTokenizer.from_pretrained(model_path())


def roles(tokenizer: PreTrainedTokenizerBase, chat_template: str | None) -> list[str]:
    conversation = [{"role": "user", "content": "Hi."}, {"role": "assistant", "content": "Yes?"}]
    template = Path(chat_template).read_text() if chat_template else None
    text = tokenizer.apply_chat_template(conversation, tokenize=False, chat_template=template)
    found = message_format(tokenizer, chat_template)
    assert found is not None
    return [message.role for message in found.messages(tokenizer.encode(text, add_special_tokens=False))]


def test_the_tokenizer_own_template(tokenizer: PreTrainedTokenizerBase) -> None:
    assert roles(tokenizer, None) == ["system", "user", "assistant"]  # SmolLM2's template adds a system message


def test_a_template_file_beats_it(tokenizer: PreTrainedTokenizerBase, tmp_path: Path) -> None:
    path = tmp_path / "other.jinja"
    path.write_text(OTHER)
    assert roles(tokenizer, str(path)) == ["user", "assistant"]


@pytest.mark.parametrize("content", ["{{ raise_exception('no') }}", "nothing of the messages"])
def test_a_template_that_tells_nothing_means_raw_text_and_says_so(
    tokenizer: PreTrainedTokenizerBase, tmp_path: Path, caplog: pytest.LogCaptureFixture, content: str
) -> None:
    path = tmp_path / "bad.jinja"
    path.write_text(content)
    with caplog.at_level(logging.WARNING):
        assert message_format(tokenizer, str(path)) is None
    assert "every prompt is read as raw text" in caplog.text


def test_a_built_in_template_name_means_raw_text(tokenizer: PreTrainedTokenizerBase) -> None:
    assert message_format(tokenizer, "chatml") is None
