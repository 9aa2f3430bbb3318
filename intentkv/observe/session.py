"""Which session a request belongs to."""

import hashlib
import itertools
import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

PREFIX_TOKENS = 256  # P of the published key

Kind = Literal["explicit", "span", "prefix", "request"]

_serial = itertools.count()


@dataclass(frozen=True)
class SessionKey:
    """A session's private key.

    Attributes:
        value: hex SHA-256; equal only for the same session under the same salts.
        kind: what it was made from. A `request` key never occurs again: nothing kept under it can be found.
    """

    value: str
    kind: Kind


def session_key(
    *,
    session_id: str | None,
    span_tokens: Sequence[int] | NDArray[np.int64] | None,
    prompt_ids: Sequence[int] | NDArray[np.int64],
    first_user_end: int | None,
    extra_key: str | None,
    cache_salt: str | None,
    rid: str,
) -> SessionKey:
    """The key of a request's session, in the published order of precedence. Call it once a request.

    1. `explicit`: the client's session id.
    2. `span`: the tokens of the span that the client designates.
    3. `prefix`: the first tokens of the prompt, at least 256 and up to the end of the first user message, so that
       tenants with the same system prompt stay apart. A prompt shorter than 256 tokens counts up to that end; once the
       conversation is longer it has another key, under which it begins anew.
    4. `request`: a prompt with no user message, or cut before its end, is a session of its own.

    `extra_key` and `cache_salt` are part of every key: sessions never meet across them.

    A `request` key counts the calls of this process, since a client may send the same rid twice. Ranks of one group see
    the same requests in the same order, so theirs are equal.
    """
    length = _prefix_length(len(prompt_ids), first_user_end)
    kind: Kind
    source: object
    if session_id is not None:
        kind, source = "explicit", session_id
    elif span_tokens is not None and len(span_tokens) > 0:
        kind, source = "span", [int(token) for token in span_tokens]
    elif length is not None:
        kind, source = "prefix", [int(token) for token in prompt_ids[:length]]
    else:
        kind, source = "request", [rid, next(_serial)]
    # JSON quotes its strings and tells null from "", so no two inputs are written alike.
    text = json.dumps([kind, source, extra_key, cache_salt])
    return SessionKey(hashlib.sha256(text.encode()).hexdigest(), kind)


def _prefix_length(n: int, first_user_end: int | None) -> int | None:
    if first_user_end is None or first_user_end > n:
        return None
    return max(first_user_end, PREFIX_TOKENS) if n >= PREFIX_TOKENS else first_user_end
