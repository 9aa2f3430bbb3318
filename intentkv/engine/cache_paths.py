"""Paths of pruned sessions through the radix tree: matching them, locking them, reading their slots.

SGLang hands one node of the tree around as a request's match. A pruned session's prefix ends on several nodes, one a
segment, so `PathNode` carries all of them. It *is* the id of the last one, which keeps every other reader of a node id
working.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch
from sglang.srt.mem_cache.base_prefix_cache import MatchPrefixParams, MatchResult, TreeLock
from sglang.srt.mem_cache.radix_cache import RadixKey

from intentkv.apply.namespace import UNREAD, Segment
from intentkv.apply.rows import below, common_prefix, page_floor, tombstones
from intentkv.engine.session_records import Record

if TYPE_CHECKING:
    from sglang.srt.mem_cache.unified_cache.unified_tree_core_interface import UnifiedTreeCoreInterface


class PathNode(int):
    """The end of a path of segments, as a node id.

    Attributes:
        path: segments from position 0 on.
        nodes: the node at the end of each segment.
        holes: `[n]` int64, positions of the path that the row must show as tombstones.
        lost: whether part of what the session had left was evicted in the meantime.
    """

    path: tuple[Segment, ...]
    nodes: tuple[int, ...]
    holes: np.ndarray
    lost: bool

    @classmethod
    def of(
        cls, root: int, path: tuple[Segment, ...], nodes: tuple[int, ...], holes: np.ndarray, lost: bool = False
    ) -> PathNode:
        node = cls(nodes[-1] if nodes else root)
        node.path, node.nodes, node.holes, node.lost = path, nodes, holes, lost
        return node

    @property
    def end(self) -> int:
        return self.path[-1].end if self.path else 0


@dataclass
class PathLock(TreeLock):
    """Locks on every segment of a path, taken and released together."""

    parts: tuple[TreeLock, ...] = ()


@dataclass(frozen=True)
class Hit:
    """How much of one record a prompt finds in the namespaces of the tree.

    Attributes:
        record: the record.
        common: whole pages that record and prompt agree on.
        found: private segments, cut to `common`, with the entries found and the node that they end on.
    """

    record: Record
    common: int
    found: tuple[tuple[Segment, int, int], ...]


def match_namespaces(core: UnifiedTreeCoreInterface, record: Record, tokens: np.ndarray) -> Hit:
    """Look up the private segments of `record` for a prompt; its plain beginning is matched by the caller afterwards.

    The last segment is looked up first: a match makes nodes recently used, and what everything else hangs on must be
    evicted last.

    Args:
        core: the tree.
        record: what the session left.
        tokens: `[length]` int64, the prompt as far as it may be matched.
    """
    common = page_floor(common_prefix(record.tokens, tokens), core.page_size)
    found = []
    for segment in reversed([s for s in record.path if s.name is not None]):
        part = segment.cut(common, core.page_size)
        entries, node = match_entries(core, part)
        found.append((part, entries, node))
    return Hit(record, common, tuple(reversed(found)))


def match_entries(core: UnifiedTreeCoreInterface, segment: Segment) -> tuple[int, int]:
    """How many entries of a private segment the tree still has, and the node that they end on."""
    result = core.match_prefix(MatchPrefixParams(key=RadixKey(segment.key(), extra_key=segment.name)))
    return result.device_prefix_len, result.last_device_node


def assemble(hit: Hit, plain: MatchResult, root: int, page_size: int) -> PathNode:
    """The longest prefix, in whole pages, that `hit` and the match of the plain text give.

    A namespace path may end in the middle: the prefix then ends before the first live position that is gone. Where the
    plain text reaches further than what the session left, it is taken, but what the session has dropped stays dropped.
    """
    head = next((s.end for s in hit.record.path if s.name is None), 0)
    wanted = min(head, hit.common)
    text = min(plain.device_prefix_len, wanted)
    reach = text if text < wanted else _reach(hit, page_size)
    path = [Segment.of_text(text)] if text else []
    nodes = [plain.last_device_node] if text else []
    for segment, entries, node in hit.found:
        part = segment.held(entries, reach)
        # A segment of which nothing is read still says how far the path goes, over holes.
        if (part.positions() != UNREAD).any() or (path[-1].end if path else 0) < part.end:
            path.append(part)
            nodes.append(node)
    lost = reach < hit.common
    if plain.device_prefix_len > reach:
        reach = plain.device_prefix_len
        path, nodes = [Segment.of_text(reach)], [plain.last_device_node]
    holes = below(hit.record.holes, min(reach, hit.common))
    return PathNode.of(root, tuple(path), tuple(nodes), holes, lost=lost)


def _reach(hit: Hit, page_size: int) -> int:
    """How far the private segments of `hit` lead: to the page of the first live position that is gone."""
    gone = [part.positions()[entries:] for part, entries, _ in hit.found]
    live = np.setdiff1d(np.concatenate([*gone, hit.record.holes]), hit.record.holes)
    return min([hit.common, *(page_floor(int(p), page_size) for p in live[live != UNREAD][:1])])


def prefix_slots(core: UnifiedTreeCoreInterface, node: PathNode, root: int, length: int) -> torch.Tensor:
    """A row for the first `length` positions of a path, `[length]` int64: slots, and tombstones at its holes."""
    row = torch.from_numpy(tombstones(np.arange(node.end), core.page_size)).to(core.device)
    for segment, end_node in zip(node.path, node.nodes, strict=True):
        positions = segment.positions()
        read = np.flatnonzero(positions != UNREAD)
        slots = core.collect_full_device_indices(end_node, root)
        row[torch.from_numpy(positions[read]).to(core.device)] = slots[torch.from_numpy(read).to(core.device)]
    holes = torch.from_numpy(node.holes).to(core.device)
    row[holes] = holes % core.page_size
    return row[:length]
