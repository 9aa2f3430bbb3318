"""One list of slots a request, for all requests of a batch in one tensor."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class SlotLists:
    """The paged keys that each request reads, in any order; built once a forward and used for all layers.

    Attributes:
        slots: `[N]` int64, the lists one after the other, on the pool's device.
        starts: `[R + 1]` int64 on the same device; request `r` has `slots[starts[r]:starts[r + 1]]`.
        lengths: R integers on the host, the lists' lengths; N in all.
    """

    slots: torch.Tensor
    starts: torch.Tensor
    lengths: tuple[int, ...]

    @classmethod
    def of(cls, lists: Sequence[torch.Tensor]) -> "SlotLists":
        """From one `[n_i]` int64 tensor a request, all on one device; at least one list. Waits for no device."""
        lengths = tuple(len(slots) for slots in lists)
        starts = torch.tensor([0, *lengths]).cumsum(0).to(lists[0].device, non_blocking=True)
        return cls(torch.cat(list(lists)), starts, lengths)

    def spans(self) -> list[slice]:
        """Where each request's entries are in `slots`."""
        ends = torch.tensor(self.lengths).cumsum(0).tolist()
        return [slice(end - length, end) for end, length in zip(ends, self.lengths, strict=True)]


def reasons_against(query: torch.Tensor, keys: torch.Tensor, lists: SlotLists) -> list[str]:
    """What is wrong with one query a request over paged keys, one line each; empty where it can run."""
    reasons = []
    if query.dim() != 3 or keys.dim() != 3 or query.shape[2] != keys.shape[2] or query.shape[1] % keys.shape[1]:
        reasons.append(
            "expected query [R, H_q, D] and keys [S, H_kv, D] with H_kv dividing H_q, "
            f"got {list(query.shape)} and {list(keys.shape)}"
        )
    if not query.is_floating_point() or not keys.is_floating_point():
        reasons.append(f"expected floating query and keys, got {query.dtype} and {keys.dtype}")
    if len({query.device, keys.device, lists.slots.device, lists.starts.device}) != 1:
        reasons.append(
            f"expected one device, got query on {query.device}, keys on {keys.device}, slots on {lists.slots.device}"
        )
    if keys.dim() == 3 and (keys.stride(2) != 1 or keys.stride(1) != keys.shape[2]):
        reasons.append(f"expected keys whose heads lie side by side, got strides {keys.stride()}")
    if len(query) != len(lists.lengths) or lists.starts.shape != (len(lists.lengths) + 1,):
        reasons.append(f"expected one query and one slot list a request, got {len(query)} and {len(lists.lengths)}")
    if lists.slots.dtype != torch.int64 or lists.slots.shape != (sum(lists.lengths),):
        reasons.append(f"expected {sum(lists.lengths)} int64 slots, got {lists.slots.dtype} {list(lists.slots.shape)}")
    return reasons
