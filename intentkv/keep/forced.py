"""The positions that no budget can drop."""

import numpy as np
from numpy.typing import NDArray

from intentkv.observe.spans import Spans


def forced_mask(length: int, spans: Spans, recent: int) -> NDArray[np.bool_]:
    """`[length]` bool, True where a position is always kept.

    Forced are the system prefix `[0, spans.system_end)`, the newest actionable span `spans.query`, and the last
    `recent` positions. What lies beyond `length` is cut off.
    """
    mask = np.zeros(length, dtype=np.bool_)
    mask[: spans.system_end] = True
    start, end = spans.query
    mask[start:end] = True
    mask[max(0, length - recent) :] = True
    return mask
