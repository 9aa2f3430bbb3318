"""The radix cache that lets pruned sessions give memory back while prefix reuse stays on.

A request without holes is served by SGLang's own code, to the letter. Once positions have been dropped, the row of the request
lies on several paths of the same tree (see `intentkv.apply.namespace`), and the overrides below keep four promises:

* a text's own key leads only to KV computed without holes;
* a private path grows only under exactly the holes it was computed behind;
* a path is locked and released as a whole;
* a slot goes back to the pool only when no one else can reach it (see `cache_events` and `intentkv.apply.ledger`).

Accounting, locking and eviction order of pruned sessions are the tree's own: an idle pruned session is an ordinary evictable entry.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import torch
from sglang.srt.managers.schedule_batch import FINISH_ABORT
from sglang.srt.mem_cache.base_prefix_cache import InsertParams, InsertResult, MatchPrefixParams, MatchResult, TreeLock
from sglang.srt.mem_cache.registry import TreeCacheBuildContext, create_unified_radix_cache, register_radix_cache_backend
from sglang.srt.mem_cache.unified_cache.component_type import ComponentType
from sglang.srt.mem_cache.unified_radix_cache import UnifiedRadixCache

from intentkv.apply.guard import SharedText
from intentkv.apply.ledger import SlotLedger
from intentkv.apply.namespace import NamespaceNames, Segment
from intentkv.apply.rows import NO_POSITIONS, droppable
from intentkv.engine.cache_audit import audit
from intentkv.engine.cache_events import apply_drop, file_tail
from intentkv.engine.cache_paths import Hit, PathLock, PathNode, assemble, match_namespaces, prefix_slots
from intentkv.engine.session_records import Record, SessionRecords

if TYPE_CHECKING:
    from sglang.srt.managers.schedule_batch import Req, ReqKvInfo
    from sglang.srt.mem_cache.cache_init_params import CacheInitParams

    from intentkv.apply.live_view import LiveViews

Layout = Literal["reclaim", "mask"]


@dataclass
class Row:
    """A running request of a session, from the allocation of its row to its release.

    Attributes:
        req: the request; `req.kv.req_pool_idx` is the row.
        path: segments of `[0, end)`, all of it filed in the tree. Behind it the row is hole-free and the request's own.
        nodes: the node at the end of each segment.
        holes: `[n]` int64, tombstones of the row, all below `end`.
    """

    req: Req
    path: tuple[Segment, ...]
    nodes: tuple[int, ...]
    holes: np.ndarray

    @property
    def index(self) -> int:
        return self.req.kv.req_pool_idx

    @property
    def end(self) -> int:
        return self.path[-1].end if self.path else 0

    @property
    def scope(self) -> tuple[str | None, str | None]:
        """Requests share KV only within their extra key and cache salt."""
        return self.req.extra_key, self.req.cache_salt

    def tokens(self) -> np.ndarray:
        """Token ids of `[0, end)`, `[end]` int32."""
        return np.array(self.req.full_untruncated_fill_ids[: self.end], dtype=np.int64).astype(np.int32)


class IntentKVRadixCache(UnifiedRadixCache):
    """SGLang's unified radix cache with sessions that may drop positions. Runs on the scheduler thread only.

    Attributes:
        layout: "reclaim" takes dropped positions out of the tree and frees them; "mask" only stops reading them and keeps
            everything in the tree, as a reference for quality.
        decide: called after each publish with (request, computed tokens); returns positions to drop, `[n]` integers. Must answer
            from host-known facts, alike on all ranks.
        views: told whenever a row's holes change.
        records: what sessions have left for their next turn.
    """

    layout: Layout = "reclaim"
    decide: Callable[[Req, int], np.ndarray] | None = None
    views: LiveViews | None = None

    def __init__(self, params: CacheInitParams) -> None:
        self.records = SessionRecords()
        self.guard = SharedText()
        self.names = NamespaceNames()
        self.rows: dict[int, Row] = {}  # sessions' requests, by row
        self.running: dict[int, Req] = {}  # every request that holds a row
        self._counts = dict.fromkeys(("events", "dropped", "freed", "namespaces_evicted"), 0)
        self.ledger = SlotLedger(params.token_to_kv_pool_allocator)
        super().__init__(params)

    def reset(self) -> None:
        super().reset()
        if self.views is not None:
            for index in self.rows:
                self.views.clear(index)
        self.records.clear()
        self.guard.clear()
        self.rows.clear()
        self.running.clear()

    # -- what a session finds: free of side effects but for recency, since it is asked many times before admission

    def match_prefix(self, params: MatchPrefixParams) -> MatchResult:
        hits = self._hits(params)
        plain = super().match_prefix(params)
        if not hits:
            return plain
        root = self.root_node_handle()
        best = max((assemble(hit, plain, root) for hit in hits), key=lambda node: node.end)
        if best.path and best.path[0].name is None and best.path[0].end < plain.device_prefix_len:
            cut = super().match_prefix(MatchPrefixParams(key=params.key[: best.path[0].end]))
            nodes = (cut.last_device_node, *best.nodes[1:])
            best = PathNode.of(root, best.path, nodes, best.holes, best.lost)
        return plain._replace(
            device_prefix_len=best.end,
            last_device_node=best,
            last_host_node=best,
            best_match_node=best,
            full_kv_hit_length=best.end,
        )

    def _hits(self, params: MatchPrefixParams) -> list[Hit]:
        session = _session_of(params.req)
        if session is None or self.disable:
            return []
        scope = (params.key.extra_key, params.key.cache_salt)
        records = [r for r in self.records.of(session) if r.scope == scope and len(r.holes)]
        if not records:
            return []
        tokens = np.array(params.key.raw_token_ids(), dtype=np.int64)
        return [match_namespaces(self.tree_core, record, tokens) for record in records]

    def prefix_device_indices(self, req: Req) -> torch.Tensor:
        if not isinstance(req.last_node, PathNode):
            return super().prefix_device_indices(req)
        return prefix_slots(self.tree_core, req.last_node, self.root_node_handle(), req.prefix_len)

    def lock(self, node_id: int, skip_lock_components: tuple[ComponentType, ...] = ()) -> TreeLock | None:
        if not isinstance(node_id, PathNode):
            return super().lock(node_id, skip_lock_components)
        parts = tuple(super(IntentKVRadixCache, self).lock(node, skip_lock_components) for node in node_id.nodes)
        return PathLock(node_id, parts[-1].receipt if parts else None, parts=parts)

    def unlock(self, lock: TreeLock | None) -> None:
        for part in lock.parts if isinstance(lock, PathLock) else (lock,):
            super().unlock(part)

    # -- a request's life: row allocated, checkpoints, release

    def maybe_hand_to_session(self, req: Req) -> None:
        super().maybe_hand_to_session(req)
        index = req.kv.req_pool_idx
        if self.disable or self.running.get(index) is req:
            return
        self.running[index] = req
        if _session_of(req) is None:
            return
        node = req.last_node
        if isinstance(node, PathNode):
            row = Row(req, node.path, node.nodes, node.holes)
            self._counts["namespaces_evicted"] += node.lost
        else:
            path = (Segment.of_text(req.prefix_len),) if req.prefix_len else ()
            row = Row(req, path, (node,) * len(path), NO_POSITIONS)
        self.rows[index] = row
        self.show(row)
        req.intentkv.reused_prefix_tokens = req.prefix_len - len(row.holes)

    def show(self, row: Row) -> None:
        """Tell everybody who reads the row about its holes."""
        row.req.intentkv.holes = row.holes
        if self.views is not None:
            self.views.set_holes(row.index, row.holes, row.end)

    def checkpoint(self, req: Req, *, up_to: int, **kwargs: Any) -> None:
        row = self.rows.get(req.kv.req_pool_idx)
        aborted = isinstance(req.finished_reason, FINISH_ABORT)
        if row is None or not len(row.holes):
            super().checkpoint(req, up_to=up_to, **kwargs)
        elif not aborted:
            file_tail(self, row, up_to)
        if row is None:
            if req.finished() and not aborted and not self.disable:
                scope = (req.extra_key, req.cache_salt)
                self.guard.note(("request", req.rid), scope, np.array(req.full_untruncated_fill_ids[:up_to], dtype=np.int64))
            return
        if not len(row.holes):
            row.path = (Segment.of_text(req.kv.cache_protected_len),)
            row.nodes = (req.last_node,)
        if not aborted:
            self._event(row, up_to)
        self._remember(row)

    def checkpoint_decoding(self, req: Req) -> int:
        """An event in the middle of decoding; returns how many positions were dropped.

        Does nothing, not even publish, when nothing is to be dropped or the request is no longer running.
        """
        row = self.rows.get(req.kv.req_pool_idx)
        if row is None or row.req is not req or req.finished() or req.is_retracted or req.skip_radix_cache_insert:
            return 0
        req.refresh_fill_ids()
        length = min(req.kv.kv_committed_len, len(req.full_untruncated_fill_ids))
        if not len(self._wanted(row, length)):
            return 0
        before = len(row.holes)
        self.checkpoint(req, up_to=length)
        return len(row.holes) - before

    def _wanted(self, row: Row, length: int) -> np.ndarray:
        if self.decide is None:
            return NO_POSITIONS
        return droppable(self.decide(row.req, length), row.holes, length, self.page_size)

    def _event(self, row: Row, length: int) -> None:
        drop = self._wanted(row, length)
        if len(drop):
            freed = apply_drop(self, row, drop)
            row.req.intentkv.dropped += len(drop)
            row.req.intentkv.freed += freed
            self._counts["events"] += 1
            self._counts["dropped"] += len(drop)
            self._counts["freed"] += freed
            self.show(row)

    def _remember(self, row: Row) -> None:
        session = _session_of(row.req)
        tokens = row.tokens()
        self.records.note(session, Record(row.scope, tokens, row.holes, row.path))
        self.guard.note(("session", session), row.scope, tokens)

    def free_kv_row(self, kv: ReqKvInfo, ranges: list[tuple[int, int]]) -> None:
        if kv.req_pool_idx in self.rows:  # a decode-time event may have filed more than the request finally owns
            ranges = [(max(start, kv.cache_protected_len), end) for start, end in ranges if end > kv.cache_protected_len]
        super().free_kv_row(kv, ranges)

    def on_release(self, req: Req, *, checkpointed: bool) -> None:
        super().on_release(req, checkpointed=checkpointed)
        self.running.pop(req.kv.req_pool_idx, None)
        if self.rows.pop(req.kv.req_pool_idx, None) is not None and self.views is not None:
            self.views.clear(req.kv.req_pool_idx)

    # -- the ledger follows slots into the tree and out of it

    def insert(self, params: InsertParams) -> InsertResult:
        result = super().insert(params)
        if not self.disable:
            self.ledger.enter_tree(params.value[result.prefix_len : len(params.key)])
        return result

    def _drain_device_frees(self, device_frees: dict[ComponentType, list[torch.Tensor]]) -> None:
        for slots in device_frees.get(ComponentType.FULL, ()):
            self.ledger.leave_tree(slots)
        super()._drain_device_frees(device_frees)

    # -- for the runtime, for metrics, for tests

    def forget_session(self, session: str) -> None:
        """Forget what `session` left. Its namespace stays in the tree until it is evicted."""
        self.records.forget(session)
        self.guard.forget(("session", session))

    def stats(self) -> dict[str, int]:
        """Sessions remembered now; events, dropped positions, freed slots and lost namespaces since the start."""
        return {"sessions": len(self.records), **self._counts}

    def audit(self) -> list[str]:
        """What is wrong with the ownership of slots, one line each. Waits for the device."""
        return audit(self)


def _session_of(req: Req | None) -> str | None:
    state = getattr(req, "intentkv", None)
    return None if state is None else state.session


def register_backend(layout: Layout = "reclaim", max_sessions: int = 1024, name: str = "intentkv") -> None:
    """Register the cache with SGLang, to be chosen by `--radix-cache-backend intentkv`."""

    def build(context: TreeCacheBuildContext) -> IntentKVRadixCache:
        cache = create_unified_radix_cache(context, cache_class=IntentKVRadixCache)
        cache.layout = layout
        cache.records.max_sessions = max_sessions
        return cache

    register_radix_cache_backend(name, build)
