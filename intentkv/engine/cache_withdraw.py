"""Taking nodes and their slots out of the radix tree: only what nobody else holds, leaf by leaf from a path's end."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from sglang.srt.mem_cache.unified_cache.component_type import ComponentType

if TYPE_CHECKING:
    from sglang.srt.mem_cache.unified_cache.unified_tree_core_interface import UnifiedTreeCoreInterface


@dataclass(frozen=True)
class Withdrawal:
    """What came out of one path.

    Attributes:
        kept: entries that stay in the tree.
        node: the node they end on; None when nothing stays.
        slots: `[n]` int64, slots of the entries behind them, now the caller's.
    """

    kept: int
    node: int | None
    slots: torch.Tensor


def withdraw(core: UnifiedTreeCoreInterface, node: int, floor: int) -> Withdrawal:
    """Remove the end of the path to `node`, down to entry `floor` or to the first node that others hold.

    The caller must have dropped its own lock. Others hold a node when they have locked it, or when their text continues
    it as a child. Both are checked before a node is touched: asking the Rust core to evict a locked or inner node
    poisons it for good. Locks cover whole paths from the root, so what nobody locks is the last `delta` entries.

    Args:
        core: the tree.
        node: end of the path.
        floor: first entry that may go; a node that crosses it stays.
    """
    path = core.collect_path_info([node])[0]
    kept = path[-1].path_end if path else 0
    probe = core.inc_lock_ref(node)
    core.dec_lock_ref(node, probe.to_dec_params())
    floor = max(floor, kept - probe.delta)
    taken: list[torch.Tensor] = []
    remaining = list(path)
    while remaining:
        last = remaining[-1]
        own_children = 1 if taken else 0  # counted before the walk: the node just removed
        if last.path_start < floor or last.num_children > own_children:
            break
        taken.append(_evict_leaf(core, last.node_id))
        remaining.pop()
    return Withdrawal(
        kept=remaining[-1].path_end if remaining else 0,
        node=remaining[-1].node_id if remaining else None,
        slots=torch.cat(taken[::-1]) if taken else torch.empty(0, dtype=torch.int64, device=core.device),
    )


def _evict_leaf(core: UnifiedTreeCoreInterface, node: int) -> torch.Tensor:
    result = core.evict_device_leaf(node, False)
    assert result.backup_kv is None, (
        "a leaf to be withdrawn had to be written back first; host caches are refused at start"
    )
    slots = torch.cat(result.device_frees.pop(ComponentType.FULL))
    # A result must not be dropped with resources in it; without a host cache there are none left.
    assert not result.host_frees and not result.cache_actions, "withdrawing a leaf left work for a host cache"
    return slots
