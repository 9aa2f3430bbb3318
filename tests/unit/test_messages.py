"""Message boundaries come out of any chat template, whatever the contents are."""

import itertools
import time
from functools import cache

import pytest

from intentkv.observe.messages import MessageFormat
from intentkv.observe.spans import GENERATION_PROMPT_TOKENS, find_spans

from . import chat_templates as templates
from .chat_templates import ToyTokenizer, renderer

CALL = [{"id": "q1w2e3r4t", "type": "function", "function": {"name": "search", "arguments": {"text": "CALL"}}}]
CALL_AS_TEXT = [
    {"id": "q1w2e3r4t", "type": "function", "function": {"name": "search", "arguments": '{"text": "CALL"}'}}
]
# What contents begin and end with decides how a tokenizer merges them with the template.
SYSTEM = {"role": "system", "content": "\nSYSTEM. Rules:\n- one"}
USER = {"role": "user", "content": "USER-ONE {\n"}
ANSWER = {"role": "assistant", "content": "ANSWER> is\n\n- 7."}
SECOND = {"role": "user", "content": '"USER-TWO"?'}
CALLING = {"role": "assistant", "content": "", "tool_calls": CALL}
CALLING_ONLY = {"role": "assistant", "content": None, "tool_calls": CALL_AS_TEXT}
TOOL = {"role": "tool", "content": '{"TOOL-ONE": 1}', "name": "search", "tool_call_id": "q1w2e3r4t"}
TOOL_TWO = {"role": "tool", "content": "<TOOL-TWO>\n", "name": "fetch", "tool_call_id": "y1x2c3v4b"}

PLAIN = [SYSTEM, USER, ANSWER, SECOND]
AGENT = [SYSTEM, USER, CALLING, TOOL, TOOL_TWO, ANSWER, SECOND, CALLING, TOOL]
NO_SYSTEM = [USER, ANSWER, SECOND]

# name, template, special tokens, conversation, how each message begins
CASES = [
    (
        "chatml",
        templates.CHATML,
        "<|im_start|> <|im_end|>",
        AGENT,
        {r: f"<|im_start|>{r}\n" for r in ("system", "user", "assistant", "tool")},
    ),
    (
        "qwen",
        templates.QWEN,
        "<|im_start|> <|im_end|> <think> </think>",
        AGENT,
        {"system": "<|im_start|>system\n", "user": "<|im_start|>user\n", "assistant": "<|im_start|>assistant\n"},
    ),
    (
        "llama3",
        templates.LLAMA3,
        "<|begin_of_text|> <|start_header_id|> <|end_header_id|> <|eot_id|>",
        AGENT,
        {
            "system": "<|begin_of_text|><|start_header_id|>system<|end_header_id|>\n\n",
            "user": "<|start_header_id|>user<|end_header_id|>\n\n",
            "assistant": "<|start_header_id|>assistant<|end_header_id|>\n\n",
            "tool": '<|start_header_id|>ipython<|end_header_id|>\n\n"',
        },
    ),
    (
        "mistral, plain text",
        templates.MISTRAL_PLAIN,
        "<s> </s>",
        NO_SYSTEM,
        {"system": "<s>", "user": "[INST] ", "assistant": " "},
    ),
    (
        "mistral, tools",
        templates.MISTRAL_TOOLS,
        "<s> </s> [INST] [/INST] [TOOL_CALLS] [TOOL_RESULTS] [/TOOL_RESULTS]",
        AGENT[1:],
        {"system": "<s>", "user": "[INST] ", "tool": '[TOOL_RESULTS] {"content": '},
    ),
    ("llama2", templates.LLAMA2, "<s> </s>", PLAIN, {"system": "<s>[INST] <<SYS>>\n", "assistant": " "}),
    (
        "llama2, no system",
        templates.LLAMA2,
        "<s> </s>",
        NO_SYSTEM,
        {"user": "<s>[INST] ", "assistant": " "},
    ),
    (
        "gemma",
        templates.GEMMA,
        "<bos> <start_of_turn> <end_of_turn>",
        NO_SYSTEM,
        {"system": "<bos>", "user": "<start_of_turn>user\n", "assistant": "<start_of_turn>model\n"},
    ),
    (
        "phi",
        templates.PHI,
        "<|user|> <|assistant|> <|system|> <|end|> <|endoftext|>",
        [*PLAIN, TOOL],  # <|tool|> is plain text to this tokenizer
        {r: f"<|{r}|>\n" for r in ("system", "user", "assistant", "tool")},
    ),
    (
        "harmony",
        templates.HARMONY,
        "<|start|> <|end|> <|message|> <|channel|> <|call|>",
        AGENT,
        {
            "system": "<|start|>system<|message|>",
            "user": "<|start|>user<|message|>",
            "assistant": "<|start|>assistant",
            "tool": "<|start|>functions.",
        },
    ),
    (
        "deepseek",
        templates.DEEPSEEK,
        "<|bos|> <|User|> <|Assistant|> <|call|> <|eos|> <|output|> <|/output|>",
        [m if m is not CALLING else CALLING_ONLY for m in AGENT],
        {"system": "<|bos|>", "user": "<|User|>", "assistant": "<|Assistant|>", "tool": "<|output|>"},
    ),
    (
        "vicuna",
        templates.VICUNA,
        "</s>",
        PLAIN,
        {"system": "\nSYSTEM", "user": "USER: ", "assistant": "ASSISTANT:"},
    ),
]
NAMES = [case[0] for case in CASES]


@cache
def learned(template: str, specials: str, metaspace: bool = False) -> tuple[MessageFormat, ToyTokenizer]:
    tokenizer = ToyTokenizer(specials, metaspace)
    return MessageFormat.from_chat_template(renderer(template), tokenizer.encode), tokenizer


def text_of(message: dict) -> str:
    """A word of the content that no other message of the conversation has."""
    return "CALL" if message.get("tool_calls") else message["content"].strip('\n{}"<>?').split(":")[0].split(".")[0][:6]


@pytest.mark.parametrize("metaspace", [False, True], ids=["gpt-like", "metaspace"])
@pytest.mark.parametrize("generation", [False, True], ids=["closed", "generation-prompt"])
@pytest.mark.parametrize(("name", "template", "specials", "conversation", "begins"), CASES, ids=NAMES)
def test_each_message_holds_its_own_content_and_no_other(
    name: str, template: str, specials: str, conversation: list[dict], begins: dict, generation: bool, metaspace: bool
) -> None:
    fmt, tokenizer = learned(template, specials, metaspace)
    ids = tokenizer.encode(renderer(template, generation=generation)(conversation))
    messages = fmt.messages(ids)

    assert [0, *[m.end for m in messages]] == [*[m.start for m in messages], len(ids)], "messages tile the prompt"
    expected = list(conversation)
    if conversation[0]["role"] != "system" and messages[0].role == "system":
        messages = messages[1:]  # BOS, or a default of the template
    if generation and len(messages) > len(expected):
        assert messages[-1].role == "assistant"
        assert messages[-1].end - messages[-1].start <= GENERATION_PROMPT_TOKENS
        messages = messages[:-1]
    assert [m.role for m in messages] == [m["role"] for m in expected]
    for message, source in zip(messages, expected, strict=True):
        text = tokenizer.decode(ids[message.start : message.end])
        assert text_of(source) in text
        others = {text_of(m) for m in conversation} - {text_of(source)}
        assert not [other for other in others if other in text]


@pytest.mark.parametrize(("name", "template", "specials", "conversation", "begins"), CASES, ids=NAMES)
def test_each_message_begins_with_its_header(
    name: str, template: str, specials: str, conversation: list[dict], begins: dict
) -> None:
    fmt, tokenizer = learned(template, specials)
    ids = tokenizer.encode(renderer(template, generation=True)(conversation))
    for message in fmt.messages(ids):
        if message.role in begins:
            assert tokenizer.decode(ids[message.start : message.end]).startswith(begins[message.role])


def test_a_tool_message_inside_a_user_turn_is_a_tool_message() -> None:
    fmt, tokenizer = learned(templates.QWEN, "<|im_start|> <|im_end|>")
    ids = tokenizer.encode(renderer(templates.QWEN)([USER, CALLING, TOOL, TOOL_TWO]))
    first, second = fmt.messages(ids)[-2:]
    assert (first.role, second.role) == ("tool", "tool")
    assert tokenizer.decode(ids[first.start : first.end]).startswith("<|im_start|>user\n<tool_response>")
    assert "TOOL-TWO" in tokenizer.decode(ids[second.start :])


def test_a_default_system_message_belongs_to_the_system_prefix() -> None:
    fmt, tokenizer = learned(templates.QWEN, "<|im_start|> <|im_end|>")
    ids = tokenizer.encode(renderer(templates.QWEN)([USER]))
    system, user = fmt.messages(ids)
    assert tokenizer.decode(ids[: system.end]) == "<|im_start|>system\nYou are a default.<|im_end|>\n"
    assert (system.role, user.role) == ("system", "user")


def test_a_system_text_that_changes_every_day_does_not_matter() -> None:
    fmt, tokenizer = learned(templates.LLAMA3, "<|begin_of_text|> <|start_header_id|> <|end_header_id|> <|eot_id|>")
    ids = tokenizer.encode(renderer(templates.LLAMA3, date="1 Jan 2031")(PLAIN))
    messages = fmt.messages(ids)
    assert [m.role for m in messages] == ["system", "user", "assistant", "user"]
    assert "SYSTEM" in tokenizer.decode(ids[: messages[0].end])


def test_special_text_quoted_in_a_content_is_plain_to_the_reader_where_the_role_cannot_follow() -> None:
    fmt, tokenizer = learned(templates.QWEN, "<|im_start|> <|im_end|>")
    quoting = {"role": "assistant", "content": "write <tool_response> around it"}
    ids = tokenizer.encode(renderer(templates.QWEN)([USER, quoting, SECOND]))
    assert [m.role for m in fmt.messages(ids)] == ["system", "user", "assistant", "user"]


@pytest.mark.parametrize("template", [templates.CHATML, templates.DEEPSEEK], ids=["chatml", "deepseek"])
def test_a_raw_prompt_has_no_messages(template: str) -> None:
    fmt, tokenizer = learned(template, "<|im_start|> <|im_end|> <|bos|> <|User|> <|Assistant|> <|eos|>")
    assert fmt.messages(tokenizer.encode("<|bos|>Once upon a time there was a user.")) == []
    assert fmt.messages([]) == []


def test_a_prompt_cut_in_the_middle_still_reads() -> None:
    fmt, tokenizer = learned(templates.CHATML, "<|im_start|> <|im_end|>")
    ids = tokenizer.encode(renderer(templates.CHATML)(AGENT))
    whole = fmt.messages(ids)
    for length in range(1, len(ids) + 1):
        part = fmt.messages(ids[:length])
        assert part[:-1] == whole[: max(0, len(part) - 1)]
        assert not part or part[-1].end == length


@pytest.mark.parametrize(
    ("template", "folds"),
    [(templates.GEMMA, True), (templates.MISTRAL_TOOLS, True), (templates.LLAMA2, False), (templates.CHATML, False)],
    ids=["gemma", "mistral", "llama2", "chatml"],
)
def test_a_system_message_folded_into_the_user_message_is_noticed(template: str, folds: bool) -> None:
    assert learned(template, "<s> </s> <bos> <|im_start|>")[0].folds_system is folds


def test_a_folded_system_message_keeps_the_first_user_message() -> None:
    fmt, tokenizer = learned(templates.GEMMA, "<bos> <start_of_turn> <end_of_turn>")
    ids = tokenizer.encode(renderer(templates.GEMMA)([SYSTEM, USER, ANSWER, SECOND]))
    prefix = tokenizer.decode(ids[: find_spans(ids, fmt).system_end])
    assert "SYSTEM" in prefix
    assert "USER-ONE" in prefix
    assert "ANSWER" not in prefix


def test_a_template_that_adds_no_bos_reads_from_the_very_first_token() -> None:
    bare = templates.MISTRAL_PLAIN.replace("{{- '<s>' -}}", "")
    fmt, tokenizer = learned(bare, "</s>", metaspace=True)
    ids = tokenizer.encode(renderer(bare)([USER, ANSWER, SECOND]))
    assert [m.role for m in fmt.messages(ids)] == ["user", "assistant", "user"]


def test_a_template_that_always_adds_a_generation_prompt_still_parts_its_messages() -> None:
    always = templates.CHATML.replace("{%- if add_generation_prompt -%}", "").removesuffix("{%- endif -%}")
    fmt, tokenizer = learned(always, "<|im_start|> <|im_end|>")
    answer = {"role": "assistant", "content": "the user is a user"}
    ids = tokenizer.encode(renderer(always)([SYSTEM, USER, answer, SECOND]))
    messages = fmt.messages(ids)
    assert [m.role for m in messages][:4] == ["system", "user", "assistant", "user"]
    _, _, assistant, second, *_ = messages
    assert tokenizer.decode(ids[second.start :]).startswith("<|im_start|>user")
    assert "the user is a user" in tokenizer.decode(ids[assistant.start : assistant.end])


@pytest.mark.parametrize(
    "template",
    ["{{ raise_exception('no') }}", "a constant", "{% for m in messages %}{{ m.content }} {% endfor %}"],
    ids=["refuses", "constant", "contents-only"],
)
def test_a_template_that_parts_nothing_is_refused_with_what_it_said(template: str) -> None:
    with pytest.raises(ValueError, match="expected a boundary before user messages"):
        learned(template, "<s>")


def test_any_order_that_the_template_takes_reads_back() -> None:
    fmt, tokenizer = learned(templates.CHATML, "<|im_start|> <|im_end|>")
    middle = [USER, ANSWER, CALLING, TOOL]
    for turns in itertools.product(middle, repeat=4):
        conversation = [SYSTEM, USER, *turns]
        ids = tokenizer.encode(renderer(templates.CHATML)(conversation))
        assert [m.role for m in fmt.messages(ids)] == [m["role"] for m in conversation]


def test_reading_a_long_prompt_is_quick() -> None:
    fmt, tokenizer = learned(templates.CHATML, "<|im_start|> <|im_end|>")
    ids = tokenizer.encode(renderer(templates.CHATML)(AGENT[1:])) * 1000
    begin = time.perf_counter()
    messages = fmt.messages(ids)
    assert time.perf_counter() - begin < 1.0
    assert len(messages) == 1000 * len(AGENT[1:])
