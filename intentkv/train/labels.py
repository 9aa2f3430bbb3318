"""Which text of a history a later tool call needed: literal matches of its arguments."""

import json
import re
from collections.abc import Iterable, Iterator, Sequence

import numpy as np
from numpy.typing import NDArray

from intentkv.train.traces import Call

NEXT_CALLS = 5
MIN_CHARS = 3  # a shorter value ("2", "no") occurs everywhere and proves nothing


def argument_values(call: Call) -> list[str]:
    """The texts and numbers among a call's arguments, as written; names of arguments, true, false and null are none.

    Arguments that are no JSON (models write such) count as one text.
    """
    try:
        parsed = json.loads(call.arguments, parse_float=str, parse_int=str)
    except (ValueError, RecursionError):  # RecursionError: brackets without end
        parsed = call.arguments
    return [value for value in _leaves(parsed) if len(value) >= MIN_CHARS]


def evidence(text: str, values: Iterable[str]) -> list[tuple[int, int]]:
    """Character ranges `[start, end)` of `text` where one of `values` literally occurs, as a whole word or words.

    A value counts as a whole. Single tokens would not do: a byte-pair tokenizer writes a code or an amount in pieces of
    one character, and every other digit of the history would match one of them.
    """
    return [
        match.span()
        for value in dict.fromkeys(values)
        for match in re.finditer(rf"(?<!\w){re.escape(value)}(?!\w)", text)
    ]


def label_tokens(offsets: NDArray[np.int64], ranges: Sequence[tuple[int, int]]) -> NDArray[np.bool_]:
    """`[N]` bool: whether a token overlaps one of the character `ranges`; `offsets` `[N, 2]` int64, its characters."""
    positive = np.zeros(len(offsets), dtype=np.bool_)
    for start, end in ranges:
        positive |= (offsets[:, 0] < end) & (offsets[:, 1] > start)
    return positive


def _leaves(value: object) -> Iterator[str]:
    ahead = [value]  # no recursion, since a model may nest its arguments as deeply as it likes
    while ahead:
        value = ahead.pop()
        if isinstance(value, str):
            yield value.strip()
        elif isinstance(value, dict | list):
            ahead += reversed(list(value.values() if isinstance(value, dict) else value))
