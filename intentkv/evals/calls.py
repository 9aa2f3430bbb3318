"""Agent sessions whose answers are tool calls, for a model that writes none of its own accord.

SGLang holds each answer to a regular expression: a Hermes call of `submit`, whose argument is one sentence. Its words, and
above all the value in it, are the model's own recall; they are written inside an action region.
"""

from __future__ import annotations

import dataclasses
import json
import re
from typing import Final

from intentkv.evals.sessions import Message, Session

# SmolLM2 knows the value where it may say a sentence about it, and not as an argument by itself (docs/actkv.md).
CALL: Final = r'<tool_call>\n\{"name": "submit", "arguments": \{"sentence": "The [^".\n]{1,80}\."\}\}\n</tool_call>'
TOKENS: Final = 128  # more than any answer of that form takes


def tool_calling(session: Session) -> Session:
    """`session` with its answers as calls, and with the loads of its records written as calls of the same kind."""
    turns = [
        dataclasses.replace(turn, messages=tuple(_as_call(message) for message in turn.messages))
        for turn in session.turns
    ]
    return dataclasses.replace(session, turns=tuple(turns), answer_tokens=TOKENS, stop=None, regex=CALL)


def _as_call(message: Message) -> Message:
    """A load as `make_session` writes it, `load_record("morning intake ledger")`, as a Hermes call; others stay."""
    load = re.fullmatch(r'(\w+)\("(.*)"\)', message["content"]) if message["role"] == "assistant" else None
    if load is None:
        return message
    call = json.dumps({"name": load[1], "arguments": {"name": load[2]}})
    return {**message, "content": f"<tool_call>\n{call}\n</tool_call>"}
