"""Tensor parallelism: what its ranks add up, and how they stay of one mind.

Every rank is a scheduler with a pool, a tree and a ledger of its own, and all of them must drop the same positions: ranks
that free other slots soon run other batches, and wait for each other for good. Counts and lengths are equal without
being told, since all ranks see the same requests in the same order. Floats are not, since the last bits of a sum depend
on threads and kernels. So the scores that an event decides by are the first rank's, on every rank.
"""

from __future__ import annotations

import os
import zlib
from typing import Any, Final

import numpy as np
import torch
from sglang.srt.runtime_context import get_parallel
from torch import Tensor, distributed

from intentkv.score.ranks import ALONE, Ranks

CHECK_ENV: Final = "INTENTKV_CHECK_RANKS"


class TensorParallelRanks(Ranks):
    """The ranks of SGLang's attention group `group`.

    SGLang's own all-reduce is not used: for speed it may choose one that sums in another order on each rank.
    """

    def __init__(self, group: Any, device: torch.device) -> None:
        """`device`: of the tensors that scorers add up."""
        self.size, self.rank = group.world_size, group.rank_in_group
        self._group = group
        self.sum(torch.zeros(1, device=device))  # the communicator is made now, and not while somebody waits

    def sum(self, part: Tensor) -> Tensor:
        distributed.all_reduce(part, group=self._group.device_group)
        return part

    def first(self, own: Tensor) -> Tensor:
        group = self._group.cpu_group if own.device.type == "cpu" else self._group.device_group
        distributed.broadcast(own, src=self._group.first_rank, group=group)
        return own


class Agreement:
    """What this rank has decided so far, and whether the others have decided the same.

    Attributes:
        digest: of all decisions; equal on ranks that were always of one mind.
    """

    def __init__(self, group: Any | None, *, check: bool) -> None:
        """`group`: SGLang's attention group, None for a rank that is alone. `check`: compare every decision at once."""
        self.digest = 0
        self._group = group
        self._check = check and group is not None

    def decided(self, session: str, length: int, drop: np.ndarray) -> None:
        """An event at `length` tokens of `session` drops `drop`, `[n]` int64.

        Raises:
            RuntimeError: decisions are compared, and another rank has decided otherwise. All ranks raise it.
        """
        told = f"{len(drop)} of session {session[:12]} at {length} tokens"
        self.digest = zlib.crc32(drop.tobytes(), zlib.crc32(told.encode(), self.digest))
        if not self._check:
            return
        said = self._gather((self.digest, told))
        if len({digest for digest, _ in said}) > 1:
            lines = "\n".join(
                f"rank {rank} drops {what} (digest {digest:08x})" for rank, (digest, what) in enumerate(said)
            )
            raise RuntimeError(
                f"expected one keep mask on all tensor-parallel ranks ({CHECK_ENV}=1), got several:\n{lines}\n"
                "a scorer or a budget depends on what is not equal on all ranks; please report it with the log"
            )

    def audit(self, own: list[str]) -> list[str]:
        """What is wrong on any rank, one line each; `own` is what is wrong on this one. All ranks must ask at the same moment."""
        if self._group is None:
            return own
        said = self._gather((own, self.digest))
        faults = [f"rank {rank}: {fault}" for rank, (found, _) in enumerate(said) for fault in found]
        if len({digest for _, digest in said}) > 1:
            faults.append(f"ranks have dropped different tokens: start with {CHECK_ENV}=1 to see where they part")
        return faults

    def _gather(self, own: Any) -> list[Any]:
        """Every rank's `own`, which must pickle, by rank. All ranks must call it at the same moment."""
        if self._group is None:
            return [own]
        said: list[Any] = [None] * self._group.world_size
        distributed.all_gather_object(said, own, group=self._group.cpu_group)
        return said


def join(device: torch.device) -> tuple[Ranks, Agreement]:
    """Of this scheduler process, whose pools are on `device`. `INTENTKV_CHECK_RANKS=1` compares every decision."""
    if get_parallel().attn_tp_size == 1:
        return ALONE, Agreement(None, check=False)
    group = get_parallel().attn_tp_group
    return TensorParallelRanks(group, device), Agreement(group, check=os.environ.get(CHECK_ENV) == "1")


def is_first() -> bool:
    """Whether this rank is the one of its group that tells: all of them decide alike."""
    return not (get_parallel().attn_tp_rank or get_parallel().pp_rank)
