"""The radix cache that lets pruned sessions give memory back while prefix reuse stays on.

A request without holes is served by SGLang's own code, to the letter. Once positions have been dropped, the row of the
request lies on several paths of the same tree (see `intentkv.apply.namespace`), and the overrides keep four promises:

* a text's own key leads only to KV computed without holes;
* a private path grows only under exactly the holes it was computed behind;
* a path is locked and released as a whole;
* a slot goes back to the pool only when no one else can reach it (see `cache_events` and `intentkv.apply.ledger`).

Accounting, locking and eviction of pruned sessions are the tree's own: an idle one is an ordinary evictable entry.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import torch
from sglang.srt.managers.schedule_batch import FINISH_ABORT
from sglang.srt.mem_cache import registry
from sglang.srt.mem_cache.base_prefix_cache import InsertParams, InsertResult, MatchPrefixParams, MatchResult, TreeLock
from sglang.srt.mem_cache.unified_cache.component_type import ComponentType
from sglang.srt.mem_cache.unified_radix_cache import UnifiedRadixCache

from intentkv.apply.guard import SharedText
from intentkv.apply.ledger import SlotLedger
from intentkv.apply.namespace import NamespaceNames
from intentkv.apply.rows import NO_POSITIONS, droppable
from intentkv.engine.cache_audit import audit
from intentkv.engine.cache_events import apply_drop, file_tail, let_go_forgotten
from intentkv.engine.cache_paths import Hit, PathLock, PathNode, assemble, match_namespaces, prefix_slots
from intentkv.engine.cache_rows import Row, session_of
from intentkv.engine.session_records import Record, SessionRecords

if TYPE_CHECKING:
    from sglang.srt.managers.schedule_batch import Req, ReqKvInfo
    from sglang.srt.mem_cache.cache_init_params import CacheInitParams

    from intentkv.apply.live_view import LiveViews

Layout = Literal["reclaim", "mask"]


class IntentKVRadixCache(UnifiedRadixCache):
    """SGLang's unified radix cache with sessions that may drop positions. Runs on the scheduler thread only.

    Attributes:
        layout: "reclaim" takes dropped positions out of the tree and frees them; "mask" takes the same steps but keeps
            them in the session's namespace, as a reference for quality.
        decide: called once before each publish with (request, computed tokens); returns positions to drop, `[n]`
            integers. Must answer from host-known facts, alike on all ranks.
        admit: called with (request, found tokens, holes) when a session's request gets a row, before its holes show.
        stop: called with a session's request; the length at which its prefill must stop for an event, or None.
        usable: called with (request, found tokens); how many of them a session's request may take.
        peak: called with (request, length); the most live tokens that the request holds at once while that many are
            computed in chunks, with an event after each. Lets prompts in that are larger than the pool (see
            `admission`).
        released: called with a session's request whose row is given back, while the row still shows what it held.
        move: called within an event with sources and destinations `[n]` int64, slots that belong to its request alone and
            of which none is in both: everything that is kept by slot must be copied, in the order of later forwards.
        applied: called after each event with (request, dropped positions `[n]` int64, freed slots).
        whole_pages: attention reads whole pages, so that no part of one may be dropped; nothing is ever moved then.
        views: told whenever a row's holes change.
        on_reset: called when everything was forgotten, so that what is kept elsewhere for sessions ends with it.
        records: what sessions have left for their next turn.
        rows: sessions' running requests; `running`: every request that holds a row. Both by row.
    """

    layout: Layout = "reclaim"
    decide: Callable[[Req, int], np.ndarray] | None = None
    admit: Callable[[Req, int, np.ndarray], None] | None = None
    stop: Callable[[Req], int | None] | None = None
    usable: Callable[[Req, int], int] | None = None
    peak: Callable[[Req, int], int] | None = None
    released: Callable[[Req], None] | None = None
    move: Callable[[torch.Tensor, torch.Tensor], None]
    applied: Callable[[Req, np.ndarray, int], None] | None = None
    whole_pages: bool = False
    views: LiveViews | None = None
    on_reset: Callable[[], None] | None = None

    def __init__(self, params: CacheInitParams) -> None:
        self.records = SessionRecords()
        self.guard = SharedText()
        self.names = NamespaceNames()
        self.rows: dict[int, Row] = {}
        self.running: dict[int, Req] = {}
        self._counts = dict.fromkeys(("events", "dropped", "freed", "namespaces_evicted"), 0)
        self.ledger = SlotLedger(params.token_to_kv_pool_allocator)
        super().__init__(params)

    def reset(self) -> None:
        super().reset()
        if self.views is not None:
            for index in self.rows:
                self.views.clear(index)
        for known in (self.records, self.guard, self.rows, self.running):
            known.clear()
        if self.on_reset is not None:
            self.on_reset()

    # -- what a session finds: asked many times before admission, so free of effects other than recency

    def match_prefix(self, params: MatchPrefixParams) -> MatchResult:
        match = self._match(params)
        if self.usable is None or session_of(params.req) is None:
            return match
        usable = self.usable(params.req, match.device_prefix_len)
        if usable >= match.device_prefix_len:
            return match
        return self._match(dataclasses.replace(params, key=params.key[:usable]))

    def _match(self, params: MatchPrefixParams) -> MatchResult:
        hits = self._hits(params)
        plain = super().match_prefix(params)
        if not hits:
            return plain
        root = self.root_node_handle()
        best = max((assemble(hit, plain, root, self.page_size) for hit in hits), key=lambda node: node.end)
        if best.path and best.path[0].name is None and best.path[0].end < plain.device_prefix_len:
            # The text goes on in the tree; the session holds it only as far as its own path does.
            head = super().match_prefix(MatchPrefixParams(key=params.key[: best.path[0].end])).last_device_node
            best = PathNode.of(root, best.path, (head, *best.nodes[1:]), best.holes, best.lost)
        nodes = dict.fromkeys(("last_device_node", "last_host_node", "best_match_node"), best)
        return plain._replace(device_prefix_len=best.end, full_kv_hit_length=best.end, **nodes)

    def _hits(self, params: MatchPrefixParams) -> list[Hit]:
        session = session_of(params.req)
        if session is None or self.disable:
            return []
        scope = (params.key.extra_key, params.key.cache_salt)
        records = [record for record in self.records.of(session) if record.scope == scope and len(record.holes)]
        tokens = np.array(params.key.raw_token_ids()) if records else NO_POSITIONS
        return [match_namespaces(self.tree_core, record, tokens) for record in records]

    def prefix_device_indices(self, req: Req) -> torch.Tensor:
        if not isinstance(req.last_node, PathNode):
            return super().prefix_device_indices(req)
        return prefix_slots(self.tree_core, req.last_node, self.root_node_handle(), req.prefix_len)

    def lock(self, node_id: int, skip_lock_components: tuple[ComponentType, ...] = ()) -> TreeLock | None:
        if not isinstance(node_id, PathNode):
            return super().lock(node_id, skip_lock_components)
        parts = [UnifiedRadixCache.lock(self, node, skip_lock_components) for node in node_id.nodes]
        return PathLock(node_id, parts[-1].receipt if parts else None, parts=tuple(parts))

    def unlock(self, lock: TreeLock | None) -> None:
        for part in lock.parts if isinstance(lock, PathLock) else (lock,):
            super().unlock(part)

    # -- a request's life: its row is allocated, filled between checkpoints, and released

    def maybe_hand_to_session(self, req: Req) -> None:
        super().maybe_hand_to_session(req)
        index = req.kv.req_pool_idx
        if self.disable or self.running.get(index) is req:
            return
        self.running[index] = req
        if session_of(req) is not None:
            row = self.rows[index] = Row.admitted(req)
            req.intentkv.reused_prefix_tokens = req.prefix_len - len(row.holes)
            self._counts["namespaces_evicted"] += isinstance(req.last_node, PathNode) and req.last_node.lost
            if self.admit is not None:
                self.admit(req, req.prefix_len, row.holes)
            self._show(row)

    def checkpoint(self, req: Req, *, up_to: int, **kwargs: Any) -> None:
        row = self.rows.get(req.kv.req_pool_idx)
        aborted = isinstance(req.finished_reason, FINISH_ABORT)
        if row is None:
            super().checkpoint(req, up_to=up_to, **kwargs)
            if req.finished() and not aborted and not self.disable:
                tokens = np.array(req.full_untruncated_fill_ids[:up_to]).astype(np.int32)
                self.guard.note(("request", req.rid), (req.extra_key, req.cache_salt), tokens)
            return
        if aborted:
            self._publish(row, up_to, aborted, **kwargs)
        else:
            # Whether the last token was computed too depends on what the scheduler launched before it knew the end.
            certain = min(up_to, len(req.full_untruncated_fill_ids) - 1) if req.finished() else up_to
            drop = self._wanted(row, certain)
            self._publish(row, certain if len(drop) or len(row.holes) else up_to, aborted, **kwargs)
            self._drop(row, drop)
        self._remember(row)

    def checkpoint_decoding(self, req: Req, up_to: int | None = None) -> int:
        """An event in the middle of decoding; returns how many positions were dropped.

        `up_to` is the length that the event covers, all computed tokens by default: what came later was computed behind
        the drop, and must not be filed as if it had not been. Does nothing, not even publish, when nothing is to be dropped or the request does not run any more.
        """
        row = self.rows.get(req.kv.req_pool_idx)
        if row is None or row.req is not req or req.finished() or req.is_retracted or req.skip_radix_cache_insert:
            return 0
        req.refresh_fill_ids()
        length = min(req.kv.kv_committed_len, len(req.full_untruncated_fill_ids))
        length = length if up_to is None else min(up_to, length)
        drop = self._wanted(row, length)
        if len(drop):
            self._publish(row, length, aborted=False)
            self._drop(row, drop)
            self._remember(row)
        return len(drop)

    def _publish(self, row: Row, up_to: int, aborted: bool, **kwargs: Any) -> None:
        if not len(row.holes):
            super().checkpoint(row.req, up_to=up_to, **kwargs)
            row.published(row.req.kv.cache_protected_len)
        elif not aborted:
            file_tail(self, row, up_to)

    def _wanted(self, row: Row, length: int) -> np.ndarray:
        drop = NO_POSITIONS if self.decide is None else self.decide(row.req, length)
        return droppable(drop, row.holes, length, self.page_size, self.whole_pages)

    def _drop(self, row: Row, drop: np.ndarray) -> None:
        if not len(drop):
            return
        freed = apply_drop(self, row, drop)
        row.req.intentkv.dropped += len(drop)
        row.req.intentkv.freed += freed
        for count, amount in (("events", 1), ("dropped", len(drop)), ("freed", freed)):
            self._counts[count] += amount
        if self.applied is not None:
            self.applied(row.req, drop, freed)
        self._show(row)

    def _show(self, row: Row) -> None:
        """Tell everybody who reads the row about its holes."""
        row.req.intentkv.holes = row.holes
        if self.views is not None:
            self.views.set_holes(row.index, row.holes, row.end)

    def _remember(self, row: Row) -> None:
        tokens = row.tokens()
        for record in self.records.note(row.session, Record(row.scope, tokens, row.holes, row.path)):
            if len(record.holes):
                let_go_forgotten(self, row, record)
        self.guard.note(("session", row.session), row.scope, tokens)

    def free_kv_row(self, kv: ReqKvInfo, ranges: list[tuple[int, int]]) -> None:
        if kv.req_pool_idx in self.rows:  # an event while decoding may have filed more than the request owns in the end
            filed = kv.cache_protected_len
            ranges = [(max(start, filed), end) for start, end in ranges if end > filed]
        super().free_kv_row(kv, ranges)

    def on_release(self, req: Req, *, checkpointed: bool) -> None:
        super().on_release(req, checkpointed=checkpointed)
        self.running.pop(req.kv.req_pool_idx, None)
        if self.released is not None and session_of(req) is not None:
            self.released(req)
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
        """Sessions remembered now and their live tokens; events, dropped positions, freed slots and lost namespaces
        since the start."""
        return {"sessions": len(self.records), "live_tokens": self.records.live_tokens(), **self._counts}

    def audit(self) -> list[str]:
        """What is wrong with the ownership of slots, one line each. Waits for the device."""
        return audit(self)


def register_backend(layout: Layout = "reclaim", max_sessions: int = 1024, name: str = "intentkv") -> None:
    """Register the cache with SGLang, to be chosen by `--radix-cache-backend`."""

    def build(context: registry.TreeCacheBuildContext) -> IntentKVRadixCache:
        cache = registry.create_unified_radix_cache(context, cache_class=IntentKVRadixCache)
        cache.layout = layout
        cache.records.max_sessions = max_sessions
        return cache

    registry.register_radix_cache_backend(name, build)
