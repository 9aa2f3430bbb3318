"""The cache's view of a running request that belongs to a session."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from intentkv.apply.namespace import Segment
from intentkv.apply.rows import NO_POSITIONS
from intentkv.engine.cache_paths import PathNode

if TYPE_CHECKING:
    from sglang.srt.managers.schedule_batch import Req


@dataclass
class Row:
    """From the allocation of a request's row to its release.

    position   0            head                              end                    committed   allocated
               |-- own key --|-- namespaces, live and dropped --|-- the request's own, live --|-- not yet computed --|
    owner      tree           tree; nobody (tombstones)          request                       request

    Attributes:
        req: the request; `req.kv.req_pool_idx` is the row.
        path: segments of `[0, end)`, all of it filed in the tree; `end` is `req.kv.cache_protected_len`.
        nodes: the node at the end of each segment.
        holes: `[n]` int64, tombstones of the row, all below `end`.
    """

    req: Req
    path: tuple[Segment, ...]
    nodes: tuple[int, ...]
    holes: np.ndarray

    @classmethod
    def admitted(cls, req: Req) -> Row:
        """The row of a request that was just allocated, as its match found it."""
        node = req.last_node
        if isinstance(node, PathNode):
            return cls(req, node.path, node.nodes, node.holes)
        row = cls(req, (), (), NO_POSITIONS)
        row.published(req.prefix_len)
        return row

    def published(self, end: int) -> None:
        """SGLang has published the row, hole-free, under its own key up to `end`."""
        self.path = (Segment.of_text(end),) if end else ()
        self.nodes = (self.req.last_node,) * len(self.path)

    @property
    def index(self) -> int:
        return self.req.kv.req_pool_idx

    @property
    def session(self) -> str:
        return self.req.intentkv.session

    @property
    def end(self) -> int:
        return self.path[-1].end if self.path else 0

    @property
    def head(self) -> int:
        """How much of the row lies under the text's own key."""
        return self.path[0].end if self.path and self.path[0].name is None else 0

    @property
    def scope(self) -> tuple[str | None, str | None]:
        """Requests share KV only within their extra key and cache salt."""
        return self.req.extra_key, self.req.cache_salt

    def tokens(self) -> np.ndarray:
        """Token ids of `[0, end)`, `[end]` int32."""
        return np.array(self.req.full_untruncated_fill_ids[: self.end]).astype(np.int32)


def session_of(req: Req | None) -> str | None:
    """The private session key of a request; None for a request that is served as by stock SGLang."""
    state = getattr(req, "intentkv", None)
    return None if state is None else state.session
