"""Generated tool-call traces, for training and tests: an agent works off a list with values that its tools showed it.

A trace is fixed by (world, seed). The user asks for a few errands at the start; records that the agent loads tell the
values they need, among others of the same kinds that nobody needs and sentences of filler; the calls that carry the
errands out come turns later. So which values matter follows from what was asked, not from where or how they are told.
"""

import json
import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

Json = dict[str, Any]


@dataclass(frozen=True)
class Thing:
    """Something with a value in a world: `what` ("number of the spare anchor"), and how a value is drawn."""

    what: str
    draw: Callable[[random.Random], str]


@dataclass(frozen=True)
class World:
    """A task family.

    Attributes:
        system: the system prompt.
        load, act: names of the tool that loads a record and of the one that carries out an errand.
        record_argument, what_argument, value_argument: names of their arguments.
        records: kinds of record ("quay ledger").
        things: what values are about; each comes up at most once in a trace.
        subjects, deeds, circumstances: parts that a sentence of filler is made of.
    """

    name: str
    system: str
    load: str
    act: str
    record_argument: str
    what_argument: str
    value_argument: str
    records: tuple[str, ...]
    things: tuple[Thing, ...]
    subjects: tuple[str, ...]
    deeds: tuple[str, ...]
    circumstances: tuple[str, ...]


def make_trace(world: World, seed: int, *, records: int = 4, told: int = 4, filler: int = 5, errands: int = 6) -> Json:
    """One trace as an OpenAI chat object: `messages`, with `tool_calls` and tool messages.

    `records` records tell `told` values each among `filler` sentences; `errands` of these values are used. With the
    defaults about 1,300 tokens of SmolLM2 and ten calls.
    """
    draw = random.Random(f"{world.name} {seed}")
    values = [(thing.what, thing.draw(draw)) for thing in draw.sample(world.things, records * told)]
    wanted = draw.sample(values, errands)
    names = draw.sample(world.records, records)
    errand_list = "; ".join(what for what, _ in wanted)
    asked = f"Please load the {', the '.join(names)}, and register these as soon as you know them: {errand_list}."
    messages: list[Json] = [{"role": "system", "content": world.system}, {"role": "user", "content": asked}]
    open_errands: list[tuple[str, str]] = []
    for number, name in enumerate(names):
        shown = values[number * told : (number + 1) * told]
        sentences = [_sentence(world, draw) for _ in range(filler)]
        for what, value in shown:
            sentences.insert(draw.randrange(len(sentences) + 1), f"The {what} is {value}.")
        _add_call(messages, world.load, {world.record_argument: name}, " ".join(sentences))
        open_errands += [pair for pair in shown if pair in wanted]
        draw.shuffle(open_errands)
        # What is left open is carried out after a later record, or at the end.
        for _ in range(draw.randrange(len(open_errands) + 1)):
            _carry_out(messages, world, open_errands.pop(), draw)
    if open_errands:
        messages.append({"role": "assistant", "content": "All records are loaded."})
        messages.append({"role": "user", "content": "Good. Now register whatever of the list is still open."})
    while open_errands:
        _carry_out(messages, world, open_errands.pop(), draw)
    messages.append({"role": "assistant", "content": "Everything on the list is registered."})
    return {"messages": messages}


def to_toolbench(trace: Json) -> Json:
    """The same trace as ToolBench writes it: `conversations` with the calls in the answers' text."""
    speakers = {"system": "system", "user": "user", "assistant": "assistant", "tool": "function"}
    lines = []
    for message in trace["messages"]:
        text = message["content"]
        for call in message.get("tool_calls", ()):
            function = call["function"]
            text = f"Thought: {text or 'I need the tool.'}\nAction: {function['name']}\nAction Input: {function['arguments']}"
        lines.append({"from": speakers[message["role"]], "value": text})
    return {"conversations": lines}


def _carry_out(messages: list[Json], world: World, errand: tuple[str, str], draw: random.Random) -> None:
    what, value = errand
    arguments = {world.what_argument: what, world.value_argument: value}
    _add_call(messages, world.act, arguments, f"Registered. {_sentence(world, draw)}")


def _add_call(messages: list[Json], name: str, arguments: Json, result: str) -> None:
    call_id = f"call{len(messages):05d}"
    function = {"name": name, "arguments": json.dumps(arguments, ensure_ascii=False)}
    call = {"id": call_id, "type": "function", "function": function}
    messages.append({"role": "assistant", "content": "", "tool_calls": [call]})
    messages.append({"role": "tool", "tool_call_id": call_id, "content": result})


def _sentence(world: World, draw: random.Random) -> str:
    return f"{draw.choice(world.subjects)} {draw.choice(world.deeds)} {draw.choice(world.circumstances)}."
