"""Checks of single fields of a trace line. A trace is untrusted: each check says what was wrong, in words fit for a page."""

from __future__ import annotations

import base64
import binascii
from collections.abc import Mapping
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

MAX_COUNT: Final = 2**31 - 1
MAX_POSITIONS: Final = 2**24
MAX_NAME: Final = 256

Fields = Mapping[str, Any]


class BadLine(ValueError):
    """A line that is left out of the report; the text says why, without what the line said."""


def count(fields: Fields, name: str, most: int = MAX_COUNT) -> int:
    """An integer in [0, most]."""
    value = fields.get(name)
    if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value <= most:
        raise BadLine(f"'{name}' is not a count")
    return value


def number(fields: Fields, name: str, most: float = 1e12) -> float:
    """A finite number in [0, most]."""
    value = fields.get(name)
    # Neither NaN nor infinity lies between; an integer may be too large for a float.
    if not isinstance(value, int | float) or isinstance(value, bool) or not 0 <= value <= most:
        raise BadLine(f"'{name}' is not a number from 0 to {most:g}")
    return float(value)


def name(fields: Fields, key: str, most: int = MAX_NAME) -> str:
    """A string of at most `most` characters."""
    value = fields.get(key)
    if not isinstance(value, str) or len(value) > most:
        raise BadLine(f"'{key}' is not a string of at most {most} characters")
    return value


def table(fields: Fields, key: str) -> Fields:
    """An object."""
    value = fields.get(key)
    if not isinstance(value, dict):
        raise BadLine(f"'{key}' is not an object")
    return value


def tokens(fields: Fields, key: str) -> NDArray[np.int32]:
    """A list of token ids, `[n]` int32."""
    value = fields.get(key)
    if not isinstance(value, list) or len(value) > MAX_POSITIONS:
        raise BadLine(f"'{key}' is not a list of token ids")
    # type(), since True is an int to isinstance and a token to nobody
    if not all(type(token) is int and 0 <= token <= MAX_COUNT for token in value):
        raise BadLine(f"'{key}' has something that is no token id")
    return np.array(value, np.int32)


def span(value: object, length: int, key: str) -> tuple[int, int]:
    """`[start, end]` with 0 <= start <= end <= length."""
    if isinstance(value, list) and len(value) == 2 and all(type(end) is int for end in value):
        start, end = value
        if 0 <= start <= end <= length:
            return start, end
    raise BadLine(f"'{key}' is not a span of the text")


def octets(fields: Fields, key: str, length: int) -> NDArray[np.uint8]:
    """Base64 of exactly `length` bytes, `[length]` uint8."""
    value = fields.get(key)
    try:
        data = base64.b64decode(value, validate=True) if isinstance(value, str) else b""
    except (binascii.Error, ValueError):
        raise BadLine(f"'{key}' is not base64") from None
    if not isinstance(value, str) or len(data) != length:
        raise BadLine(f"'{key}' does not have {length} bytes")
    return np.frombuffer(data, np.uint8)


def bits(fields: Fields, key: str, length: int) -> NDArray[np.bool_]:
    """Base64 of a bit for each of `length` positions, `[length]` bool."""
    return np.unpackbits(octets(fields, key, -(-length // 8)))[:length].astype(np.bool_)
