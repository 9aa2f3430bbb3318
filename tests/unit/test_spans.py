"""The system prefix and the newest actionable span of a prompt."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from intentkv.observe.messages import MessageFormat
from intentkv.observe.spans import GENERATION_PROMPT_TOKENS, Spans, find_spans, query_positions

from . import chat_templates as templates
from .chat_templates import ToyTokenizer, renderer

TOKENIZER = ToyTokenizer("<|im_start|> <|im_end|>")
CHATML = MessageFormat.from_chat_template(renderer(templates.CHATML), TOKENIZER.encode)
SYSTEM = {"role": "system", "content": "be brief and exact"}
USER = {"role": "user", "content": "find the ship"}
ANSWER = {"role": "assistant", "content": "it sank"}
TOOL = {"role": "tool", "content": "first result"}
TOOL_TWO = {"role": "tool", "content": "second result"}


def prompt(*conversation: dict, generation: bool = True) -> list[int]:
    return TOKENIZER.encode(renderer(templates.CHATML, generation=generation)(list(conversation)))


def query_text(ids: list[int]) -> str:
    return TOKENIZER.decode(ids[slice(*find_spans(ids, CHATML).query)])


def test_the_newest_user_message_and_the_generation_prompt_ask() -> None:
    ids = prompt(SYSTEM, USER, ANSWER, USER)
    assert query_text(ids) == "<|im_start|>user\nfind the ship<|im_end|>\n<|im_start|>assistant\n"
    spans = find_spans(ids, CHATML)
    assert TOKENIZER.decode(ids[: spans.system_end]) == "<|im_start|>system\nbe brief and exact<|im_end|>\n"
    assert TOKENIZER.decode(ids[: spans.first_user_end]).endswith("find the ship<|im_end|>\n")
    assert spans.first_user_end < spans.query[0]


def test_all_tool_messages_in_a_row_ask_and_an_earlier_one_does_not() -> None:
    text = query_text(prompt(SYSTEM, USER, TOOL, ANSWER, TOOL, TOOL_TWO))
    assert text.startswith("<|im_start|>tool\nfirst result")
    assert "second result" in text
    assert text.count("first result") == 1
    assert text.endswith("<|im_start|>assistant\n")


def test_what_was_said_is_neither_system_nor_tool_nor_newest() -> None:
    ids = prompt(SYSTEM, USER, ANSWER, TOOL, ANSWER, USER)
    said = [TOKENIZER.decode(ids[slice(*bounds)]) for bounds in find_spans(ids, CHATML).said]
    assert [text.split("\n")[0] for text in said] == [
        f"<|im_start|>{role}" for role in ("user", "assistant", "assistant")
    ]
    assert "it sank" in said[1] and find_spans(prompt(SYSTEM, USER), CHATML).said == ()


def test_the_newest_user_message_asks_alone() -> None:
    assert "first result" not in query_text(prompt(SYSTEM, USER, TOOL, USER))


def test_a_long_answer_behind_the_question_is_not_part_of_it() -> None:
    ids = prompt(USER, {"role": "assistant", "content": "word " * 100})
    start, end = find_spans(ids, CHATML).query
    assert TOKENIZER.decode(ids[start:end]).count("word") < GENERATION_PROMPT_TOKENS
    assert end < len(ids)


def test_without_a_system_message_the_first_four_tokens_are_the_prefix() -> None:
    assert find_spans(prompt(USER), CHATML).system_end == 4


def test_a_prompt_that_only_has_a_system_message_is_read_as_a_raw_one() -> None:
    ids = prompt(SYSTEM, generation=False)
    assert find_spans(ids, CHATML) == Spans(4, (0, len(ids)), None)


@pytest.mark.parametrize("fmt", [None, CHATML], ids=["no template", "raw prompt"])
@pytest.mark.parametrize(
    ("length", "expected"),
    [
        (0, Spans(0, (0, 0))),
        (1, Spans(1, (0, 1))),
        (128, Spans(4, (0, 128))),
        (1000, Spans(4, (872, 1000))),
    ],
)
def test_raw_prompts_fall_back_to_sinks_and_the_end(fmt: MessageFormat | None, length: int, expected: Spans) -> None:
    assert find_spans([10**6] * length, fmt) == expected


@given(st.lists(st.sampled_from([SYSTEM, USER, ANSWER, TOOL]), max_size=8), st.booleans())
def test_spans_lie_in_the_prompt(conversation: list[dict], generation: bool) -> None:
    ids = prompt(*conversation, generation=generation)
    spans = find_spans(ids, CHATML)
    assert 0 <= spans.system_end <= len(ids)
    assert 0 <= spans.query[0] <= spans.query[1] <= len(ids)
    asked = [m for m in conversation if m["role"] in ("user", "tool")]
    if asked:
        assert asked[-1]["content"] in TOKENIZER.decode(ids[slice(*spans.query)])


def test_the_querys_live_positions_are_those_that_are_there() -> None:
    spans = Spans(system_end=4, query=(100, 120))
    none = np.empty(0, dtype=np.int64)
    assert query_positions(spans, 150, none).tolist() == list(range(100, 120))
    assert query_positions(spans, 110, none).tolist() == list(range(100, 110))
    assert query_positions(spans, 150, np.array([7, 101, 119, 130])).tolist() == [100, *range(102, 119)]


def test_before_the_query_begins_the_newest_tokens_stand_in_for_it() -> None:
    spans = Spans(system_end=4, query=(100, 120))
    none = np.empty(0, dtype=np.int64)
    assert query_positions(spans, 90, none).tolist() == list(range(26, 90))
    assert query_positions(spans, 30, np.array([5])).tolist() == [p for p in range(30) if p != 5]
