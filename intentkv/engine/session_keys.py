"""Which session a request belongs to: asked by the scheduler that serves it, and by the front process that sends it there."""

from __future__ import annotations

import numpy as np

from intentkv.config import RequestSettings
from intentkv.observe.session import SessionKey, session_key
from intentkv.observe.spans import Spans


def request_key(
    settings: RequestSettings,
    ids: np.ndarray,
    spans: Spans,
    *,
    extra_key: str | None,
    cache_salt: str | None,
    rid: str,
) -> SessionKey:
    """The key of a request's session; `ids`: `[n]` int64, its prompt, with `spans`. Call it once a request."""
    return session_key(
        session_id=settings.session,
        span_tokens=ids[slice(*settings.span)] if settings.span else None,
        prompt_ids=ids,
        first_user_end=spans.first_user_end,
        extra_key=extra_key,
        cache_salt=cache_salt,
        rid=rid,
    )
