"""Checks of single setting values. Each takes what a user wrote and returns the value, or raises ValueError."""

import difflib
import math
import os
import unicodedata
from collections.abc import Callable, Iterable

MAX_TOKENS = 2**31 - 1  # positions are int32 in SGLang's rows
MAX_SESSION_ID = 256


def shown(raw: object) -> str:
    """The value as it goes into a message: its repr, cut so that a huge value cannot flood a log."""
    try:
        text = repr(raw)
    except (RecursionError, ValueError):  # nested too deeply, or an integer of thousands of digits
        return f"a {type(raw).__name__} too large to show"
    return text if len(text) <= 80 else text[:77] + "..."


def named(key: str) -> str:
    """A key as it goes into a message: as it is, or as `shown` where it is empty, long or not printable."""
    return key if 0 < len(key) <= 80 and key.isprintable() else shown(key)


def nearest(word: str, known: Iterable[str]) -> str:
    """The known word most like `word`."""
    word = word[:80]  # the search takes the square of the length
    return difflib.get_close_matches(word, list(known), n=1, cutoff=0.0)[0]


def as_int(raw: object) -> int | None:
    """The integer that `raw` is or spells, or None."""
    if isinstance(raw, str) and raw.strip().isdecimal() and len(raw) <= 20:
        return int(raw)
    # bool is an int to Python, but `budget = true` is a mistake, not a one.
    return raw if isinstance(raw, int) and not isinstance(raw, bool) else None


def as_float(raw: object) -> float | None:
    """The finite number that `raw` is or spells, or None."""
    if isinstance(raw, bool) or not isinstance(raw, str | int | float):
        return None
    try:
        value = float(raw)
    except (ValueError, OverflowError):
        return None
    return value if math.isfinite(value) else None


def integer(low: int, high: int = MAX_TOKENS) -> Callable[[object], int]:
    """A check for an integer in [low, high], given as an int or in digits."""

    def check(raw: object) -> int:
        value = as_int(raw)
        if value is None or not low <= value <= high:
            raise ValueError(f"expected an integer from {low} to {high}, got {shown(raw)}")
        return value

    return check


def number(low: float, high: float) -> Callable[[object], float]:
    """A check for a finite number in [low, high]."""

    def check(raw: object) -> float:
        value = as_float(raw)
        if value is None or not low <= value <= high:
            raise ValueError(f"expected a number from {low:g} to {high:g}, got {shown(raw)}")
        return value

    return check


def choice(options: Iterable[str]) -> Callable[[object], str]:
    """A check for one word out of `options`."""
    known = tuple(options)

    def check(raw: object) -> str:
        if not isinstance(raw, str) or raw not in known:
            hint = f"; the nearest is {nearest(raw, known)!r}" if isinstance(raw, str) else ""
            raise ValueError(f"expected one of {', '.join(known)}, got {shown(raw)}{hint}")
        return raw

    return check


def switch(raw: object) -> bool:
    """A check for true or false."""
    if isinstance(raw, bool):
        return raw
    raise ValueError(f"expected true or false, got {shown(raw)}")


def folder(raw: object) -> str:
    """A check for a folder that exists or can be made, and can be written to; its absolute path. Nothing is made yet."""
    if not isinstance(raw, str) or not raw or "\0" in raw:
        raise ValueError(f"expected a folder, got {shown(raw)}")
    path = os.path.abspath(raw)
    nearest_there = path
    while not os.path.lexists(nearest_there):
        nearest_there = os.path.dirname(nearest_there)
    if not os.path.isdir(nearest_there) or not os.access(nearest_there, os.W_OK | os.X_OK):
        raise ValueError(
            f"expected a folder that can be made and written to, got {shown(raw)}: look at {nearest_there}"
        )
    return path


def file_path(raw: object) -> str:
    """A check for the path of a file that is there; gives it absolute, since other processes may start elsewhere."""
    if not isinstance(raw, str | os.PathLike) or not os.path.isfile(raw):
        raise ValueError(f"expected the path of a file, got {shown(raw)}, where there is none")
    return os.path.abspath(raw)


def session_id(raw: object) -> str:
    """A check for a session id: 1 to 256 characters, none of them a control character or half a surrogate pair."""
    # Surrogates cannot be encoded, so they could not be hashed into a session key.
    if (
        not isinstance(raw, str)
        or not 1 <= len(raw) <= MAX_SESSION_ID
        or any(unicodedata.category(char) in ("Cc", "Cs") for char in raw)
    ):
        raise ValueError(
            f"expected a string of 1 to {MAX_SESSION_ID} characters without control characters, got {shown(raw)}"
        )
    return raw


def token_span(raw: object) -> tuple[int, int]:
    """A check for "start:end", token positions of the prompt, start included and end not."""
    parts = raw.split(":") if isinstance(raw, str) else []
    ends = [as_int(part) for part in parts]
    if len(ends) == 2:
        start, end = ends
        if start is not None and end is not None and 0 <= start < end <= MAX_TOKENS:
            return start, end
    raise ValueError(f'expected "start:end", token positions with 0 <= start < end, got {shown(raw)}')
