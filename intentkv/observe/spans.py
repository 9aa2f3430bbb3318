"""The parts of a prompt that a decision is about: the system prefix, and the newest message that asks for something."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from intentkv.observe.messages import Message, MessageFormat

SINK_TOKENS = 4  # the first tokens draw attention whatever they say (StreamingLLM, arXiv 2309.17453)
RAW_QUERY_TOKENS = 128  # of a prompt without messages, the end asks
GLIMPSE_TOKENS = 64  # before the query is reached, the tokens before an event stand in for it
GENERATION_PROMPT_TOKENS = 16  # longest known: an assistant header and an empty reasoning block


@dataclass(frozen=True)
class Spans:
    """Token positions of a prompt.

    Attributes:
        system_end: `[0, system_end)` is the system prefix, always kept.
        query: `[start, end)`, the newest actionable span, always kept.
        first_user_end: end of the first user message, None if there is none.
        said: `[start, end)` of each message of user and assistant between those two, in order.
    """

    system_end: int
    query: tuple[int, int]
    first_user_end: int | None = None
    said: tuple[tuple[int, int], ...] = ()


def find_spans(ids: Sequence[int] | NDArray[np.int64], fmt: MessageFormat | None) -> Spans:
    """The spans of a prompt.

    The newest actionable span is the latest user or tool message (all of several tool messages in a row), with the
    generation prompt behind it: at most 16 tokens of the assistant message that follows.

    The system prefix is all that precedes the first user or assistant message, and at least the first 4 tokens. Where
    the template writes the system message into the first user message, that message belongs to it, since nothing tells
    where the one ends.

    Without a format (no chat template), or without a message in `ids` (a raw prompt), the system prefix is the first 4
    tokens and the query the last 128, or what there is of them.

    Args:
        ids: the prompt.
        fmt: the message format of its tokenizer, or None.
    """
    n = len(ids)
    messages = fmt.messages(ids) if fmt is not None else []
    system_end = messages[0].end if messages and messages[0].role == "system" else 0
    first_user_end = next((m.end for m in messages if m.role == "user"), None)
    if fmt is not None and fmt.folds_system and first_user_end is not None:
        system_end = first_user_end
    query = _actionable(messages) or (max(0, n - RAW_QUERY_TOKENS), n)
    return Spans(
        system_end=max(system_end, min(SINK_TOKENS, n)),
        query=query,
        first_user_end=first_user_end,
        said=tuple(
            (m.start, m.end)
            for m in messages
            if m.role in ("user", "assistant") and system_end <= m.start and m.end <= query[0]
        ),
    )


def query_positions(spans: Spans, length: int, holes: NDArray[np.int64]) -> NDArray[np.int64]:
    """Live positions of the query among the first `length` tokens, ascending int64.

    The actionable span as far as it is there; before it begins, the last 64 tokens in its stead. `holes` are left out:
    a client may come back to an earlier message that has been dropped in part.
    """
    start, end = spans.query
    if start >= length:
        start, end = max(0, length - GLIMPSE_TOKENS), length
    positions = np.arange(start, min(end, length), dtype=np.int64)
    return positions[~np.isin(positions, holes)]


def _actionable(messages: list[Message]) -> tuple[int, int] | None:
    last = next((i for i in reversed(range(len(messages))) if messages[i].role in ("user", "tool")), None)
    if last is None:
        return None
    first = last
    while messages[first].role == "tool" and first > 0 and messages[first - 1].role == "tool":
        first -= 1
    end = messages[last].end
    if last + 1 < len(messages) and messages[last + 1].role == "assistant":
        end = min(messages[last + 1].end, end + GENERATION_PROMPT_TOKENS)
    return messages[first].start, end
