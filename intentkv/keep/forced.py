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


def whole_pages(mask: NDArray[np.bool_], page_size: int) -> NDArray[np.bool_]:
    """`mask` `[length]` bool rounded out to pages: a page with one forced position, or cut off at the end, is forced.

    Where attention reads whole pages, they are what an event chooses among.
    """
    pages = np.pad(mask, (0, -len(mask) % page_size), constant_values=True).reshape(-1, page_size)
    return np.repeat(pages.any(axis=1), page_size)[: len(mask)]


def last_page(mask: NDArray[np.bool_], page_size: int) -> NDArray[np.bool_]:
    """`mask` `[length]` bool with the unfinished page at its end forced too: the next token continues it. A copy."""
    forced = mask.copy()
    forced[len(mask) // page_size * page_size :] = True
    return forced
