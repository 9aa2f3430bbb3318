"""Reading traces of both forms, rendering them, and the literal match that labels are made by."""

import json
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from intentkv.evals.model import model_path
from intentkv.train.generate import make_trace, to_toolbench
from intentkv.train.labels import argument_values, evidence, label_tokens
from intentkv.train.render import Renderer
from intentkv.train.traces import Call, TraceError, TraceMessage, parse_trace, read_traces
from intentkv.train.worlds import GREENHOUSE, HARBOUR, WORLDS

from .chat_templates import QWEN


@cache
def tokenizer() -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(model_path())


def test_generated_traces_depend_on_world_and_seed_alone() -> None:
    texts = {json.dumps(make_trace(world, seed)) for world in WORLDS.values() for seed in (0, 1)}
    assert len(texts) == 2 * len(WORLDS)
    assert make_trace(HARBOUR, 5) == make_trace(HARBOUR, 5)


@pytest.mark.parametrize("world", WORLDS.values(), ids=lambda world: world.name)
def test_a_generated_trace_uses_what_its_records_told_and_leaves_most_of_it(world: Any) -> None:
    trace = parse_trace(make_trace(world, 3))
    carried_out = [json.loads(c.arguments) for m in trace for c in m.calls if c.name == world.act]
    told = " ".join(m.content for m in trace if m.role == "tool")
    assert len(carried_out) == 6
    for arguments in carried_out:
        what, value = arguments[world.what_argument], arguments[world.value_argument]
        assert f"The {what} is {value}." in told
        assert what in trace[1].content
    assert told.count(" is ") >= 16


def test_both_forms_say_the_same() -> None:
    chat = make_trace(GREENHOUSE, 2)
    openai, toolbench = parse_trace(chat), parse_trace(to_toolbench(chat))
    assert [m.role for m in openai] == [m.role for m in toolbench]
    assert [m.calls for m in openai] == [m.calls for m in toolbench]
    assert sum(len(m.calls) for m in openai) == 10


def test_toolbench_answers_are_parsed_as_models_write_them() -> None:
    value = '\nThought: look it up\nAction: find_for_maps\nAction Input: {\n  "city": "Lyon"\n}'
    (message,) = parse_trace({"conversations": [{"from": "assistant", "value": value}]})
    assert message.calls == (Call("find_for_maps", '{\n  "city": "Lyon"\n}'),)
    (plain,) = parse_trace({"conversations": [{"from": "user", "value": "Action: x\nAction Input: {}"}]})
    assert plain.calls == ()


def test_openai_contents_may_be_absent_or_in_parts() -> None:
    raw = [
        {"role": "developer", "content": [{"type": "text", "text": "be "}, {"type": "text", "text": "brief"}]},
        {"role": "assistant", "content": None, "tool_calls": [{"function": {"name": "f", "arguments": {"a": "b"}}}]},
    ]
    assert parse_trace({"messages": raw}) == (
        TraceMessage("system", "be brief"),
        TraceMessage("assistant", "", (Call("f", '{"a": "b"}'),)),
    )


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("{", "line 2"),
        ("[]", "expected an object with a list `messages`"),
        ('{"messages": [{"role": "robot"}]}', "role: expected one of system, developer"),
        ('{"messages": [{"role": "user", "content": 5}]}', "content: expected a text or a list of parts, got int"),
        ('{"messages": [{"role": "assistant", "tool_calls": ["f"]}]}', "expected objects with function.name"),
        ('{"conversations": [{"from": "user"}]}', "value: expected a text, got NoneType"),
    ],
)
def test_a_bad_line_is_named(tmp_path: Path, line: str, said: str) -> None:
    path = tmp_path / "traces.jsonl"
    path.write_text(f'{{"messages": []}}\n{line}\n')
    with pytest.raises(TraceError, match="line 2") as caught:
        list(read_traces(path))
    assert said in str(caught.value)


def test_values_are_leaves_as_written_and_short_ones_prove_nothing() -> None:
    arguments = '{"a": "KX-402", "b": [1.50, {"c": " Ada Falk "}], "d": 7, "e": true, "f": null, "g": "no", "h": 12345}'
    assert argument_values(Call("f", arguments)) == ["KX-402", "1.50", "Ada Falk", "12345"]
    assert argument_values(Call("f", "plain words")) == ["plain words"]


def test_a_value_matches_whole_and_literally_wherever_it_occurs() -> None:
    text = "KX-402 and KX-4021, kx-402, AKX-402; KX-402."
    assert evidence(text, ["KX-402", "KX-402"]) == [(0, 6), (37, 43)]
    assert evidence("costs $1,240 (about)", ["$1,240"]) == [(6, 12)]
    assert evidence("a.c abc", ["a.c"]) == [(0, 3)]
    assert evidence("anything", []) == []


def test_tokens_that_overlap_a_match_are_positive() -> None:
    offsets = np.array([[0, 3], [3, 4], [4, 8], [8, 8]])
    assert label_tokens(offsets, [(3, 5)]).tolist() == [False, True, True, False]
    assert label_tokens(offsets, []).tolist() == [False] * 4


def test_turns_know_their_prompts_and_the_calls_that_follow() -> None:
    trace = parse_trace(make_trace(HARBOUR, 1))
    rendered = Renderer(tokenizer()).render(trace)
    assert rendered.rewritten == 0
    assert len(rendered.turns) == sum(m.role == "assistant" for m in trace)
    for turn in rendered.turns:
        assert rendered.text[: turn.chars].endswith("<|im_start|>assistant\n")
        assert tokenizer().decode(rendered.ids[: turn.tokens]) == rendered.text[: turn.chars]
        if turn.calls:
            assert rendered.text[turn.chars :].index(turn.calls[0].arguments) < 200
    assert len(rendered.turns[0].calls) == 10
    assert rendered.turns[-1].calls == ()


@pytest.mark.parametrize("form", ["openai", "toolbench"])
def test_template_tokens_are_not_content(form: str) -> None:
    chat = make_trace(HARBOUR, 1)
    trace = parse_trace(chat if form == "openai" else to_toolbench(chat))
    rendered = Renderer(tokenizer()).render(trace)
    own = [
        rendered.text[start:end]
        for (start, end), content in zip(rendered.offsets, rendered.content, strict=True)
        if content
    ]
    template = [
        rendered.text[s:e] for (s, e), content in zip(rendered.offsets, rendered.content, strict=True) if not content
    ]
    assert not {"<|im_start|>", "<|im_end|>"} & set(own)
    assert {"<|im_start|>", "<|im_end|>"} <= set(template)
    for message in trace:
        assert message.content in "".join(own)


def test_a_template_that_knows_calls_writes_them_itself() -> None:
    from transformers import AutoTokenizer

    qwen = AutoTokenizer.from_pretrained(model_path())
    qwen.chat_template = QWEN  # writes an empty reasoning block into the generation prompt and the last answer
    rendered = Renderer(qwen).render(parse_trace(make_trace(HARBOUR, 1)))
    assert '<tool_call>\n{"name": "load_record", "arguments": {"record": ' in rendered.text
    assert rendered.rewritten == 0
    ends = [rendered.text[: turn.chars] for turn in rendered.turns]
    assert all(end.endswith("<|im_end|>\n") for end in ends)


def test_turns_whose_prompts_are_rewritten_are_left_out_and_counted() -> None:
    from transformers import AutoTokenizer

    counting = AutoTokenizer.from_pretrained(model_path())
    counting.chat_template = (
        "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if loop.first %}{{ messages | length }} {% endif %}"
        "{{ m.content }}<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    )
    rendered = Renderer(counting).render(parse_trace(make_trace(HARBOUR, 1)))
    assert rendered.turns == ()
    assert rendered.rewritten == 12
