"""A trace as the model reads it: token ids by its own chat template, and where each turn's prompt ends."""

import json
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from intentkv.observe.messages import MessageFormat
from intentkv.train.labels import argument_values, label_tokens
from intentkv.train.traces import Call, Trace, TraceMessage


@dataclass(frozen=True)
class Turn:
    """A request of the agent: its prompt is the first `tokens` tokens and `chars` characters of the trace.

    `calls` are all tool calls that follow it, its own answer's first.
    """

    tokens: int
    chars: int
    calls: tuple[Call, ...]


@dataclass(frozen=True)
class Rendered:
    """Attributes:
    text: the whole conversation by the chat template.
    ids: `[N]` int64.
    offsets: `[N, 2]` int64, the characters of each token.
    content: `[N]` bool, False for what the template adds: headers, footers, the wrapping of calls.
    turns: in order.
    rewritten: turns left out because the template writes their prompt in another way than the whole conversation begins.
    """

    text: str
    ids: NDArray[np.int64]
    offsets: NDArray[np.int64]
    content: NDArray[np.bool_]
    turns: tuple[Turn, ...]
    rewritten: int


class Renderer:
    """Renders traces for one tokenizer."""

    def __init__(self, tokenizer: Any) -> None:
        """`tokenizer`: a fast `transformers` tokenizer with a chat template. Raises ValueError if it tells no messages."""
        self._tokenizer = tokenizer
        self.format = MessageFormat.from_chat_template(self._template, self._encode)
        probe = [
            {"role": "user", "content": "a"},
            self._native(TraceMessage("assistant", "b", (Call("f", '{"x": "probe"}'),))),
        ]
        try:
            self._knows_calls = "probe" in self._template(probe)
        except Exception:  # noqa: BLE001 (templates raise what they like for messages they refuse)
            self._knows_calls = False

    def render(self, trace: Trace) -> Rendered:
        messages = [self._message(message) for message in trace]
        text = self._template(messages)
        encoded = self._tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
        ids = np.asarray(encoded["input_ids"], dtype=np.int64)
        offsets = np.asarray(encoded["offset_mapping"], dtype=np.int64).reshape(-1, 2)
        calls = [call for message in trace for call in message.calls]
        turns, rewritten, seen = [], 0, 0
        for i, message in enumerate(trace):
            if message.role == "assistant" and i > 0:
                # Some templates write the header in another way once the answer is there: then the prompt ends before it.
                prompts = [self._template(messages[:i], generation=header) for header in (True, False)]
                found = ((prompt, self._encode(prompt)) for prompt in prompts if text.startswith(prompt))
                same = next((pair for pair in found if np.array_equal(pair[1], ids[: len(pair[1])])), None)
                if same is None:
                    rewritten += 1
                else:
                    turns.append(Turn(len(same[1]), len(same[0]), tuple(calls[seen:])))
            seen += len(message.calls)
        own = label_tokens(offsets, _own_text(text, trace))
        return Rendered(text, ids, offsets, own, tuple(turns), rewritten)

    def _message(self, message: TraceMessage) -> dict[str, Any]:
        if not message.calls or message.calls_in_content:
            return {"role": message.role, "content": message.content}
        if self._knows_calls:
            return self._native(message)
        # A template without calls would drop them: they are written as Hermes models write them.
        written = [
            f'<tool_call>\n{{"name": "{c.name}", "arguments": {c.arguments}}}\n</tool_call>' for c in message.calls
        ]
        return {"role": message.role, "content": "\n".join([message.content, *written]).strip()}

    def _native(self, message: TraceMessage) -> dict[str, Any]:
        calls = [
            {"id": f"call{i:05d}", "type": "function", "function": {"name": c.name, "arguments": _parsed(c.arguments)}}
            for i, c in enumerate(message.calls)
        ]
        return {"role": message.role, "content": message.content, "tool_calls": calls}

    def _template(self, messages: list[dict[str, Any]], generation: bool = False) -> str:
        text: str = self._tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=generation)
        return text

    def _encode(self, text: str) -> list[int]:
        ids: list[int] = self._tokenizer.encode(text, add_special_tokens=False)
        return ids


def _own_text(text: str, trace: Trace) -> list[tuple[int, int]]:
    """Character ranges that the messages themselves put into `text`, found in order."""
    ranges, cursor = [], 0
    for message in trace:
        pieces = [message.content]
        if not message.calls_in_content:
            pieces += [piece for call in message.calls for piece in (call.name, *argument_values(call))]
        for piece in (piece.strip() for piece in pieces):
            start = text.find(piece, cursor) if piece else -1
            if start >= 0:
                cursor = start + len(piece)
                ranges.append((start, cursor))
    return ranges


def _parsed(arguments: str) -> Any:
    """Templates take the arguments as a mapping; what is no JSON goes in as it is."""
    try:
        return json.loads(arguments)
    except (ValueError, RecursionError):  # RecursionError: brackets without end
        return arguments
