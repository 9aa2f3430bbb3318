"""One-pass copy of KV slots inside the pool, by a plan whose sources and destinations do not meet (ActKV, Algorithm 4)."""

import functools

import torch
import triton
import triton.language as tl

_SCRATCH_BYTES = 256 * 2**10  # of the torch path, allocated once; stays in the cache of a core
_BLOCK = 1024  # elements a program moves at a time


def copy_slots(keys: torch.Tensor, values: torch.Tensor, sources: torch.Tensor, destinations: torch.Tensor) -> None:
    """Copy the KV entries of one layer from `sources` to `destinations`, bit by bit; no KV-sized buffer is allocated.

    The caller guarantees what `apply.compaction.plan_compaction` does: no slot is both source and destination, and no
    destination stands twice. Then the order of the copies does not matter, and they run side by side: one program an
    entry on a GPU. Checking it here would make the host wait.

    Args:
        keys, values: `[S, H_kv, D]` of one shape and any dtype, each entry contiguous; written at `destinations` only.
        sources, destinations: `[n]` int64 each, below S, on the pool's device.

    Raises:
        ValueError: shapes, dtypes, strides or devices that do not fit, with every reason.
    """
    _check(keys, values, sources, destinations)
    if not len(sources):
        return
    if keys.is_cuda or triton.knobs.runtime.interpret:
        entry = keys[0].numel()
        copy_kernel[(len(sources),)](
            _as_integers(keys), _as_integers(values), sources, destinations, keys.stride(0), values.stride(0),
            ENTRY=entry, BLOCK=min(_BLOCK, triton.next_power_of_2(entry)),
        )  # fmt: skip
    else:
        for pool in (keys, values):
            _copy_torch(pool, sources, destinations)


def _copy_torch(pool: torch.Tensor, sources: torch.Tensor, destinations: torch.Tensor) -> None:
    pool = _as_integers(pool)
    scratch = _scratch().view(pool.dtype)
    step = max(1, scratch.numel() // pool[0].numel())
    for start in range(0, len(sources), step):
        part = sources[start : start + step]
        room = scratch[: len(part) * pool[0].numel()].view(len(part), *pool.shape[1:])
        torch.index_select(pool, 0, part, out=room)
        pool.index_copy_(0, destinations[start : start + step], room)


@functools.cache
def _scratch() -> torch.Tensor:
    return torch.empty(_SCRATCH_BYTES, dtype=torch.uint8)


def _as_integers(pool: torch.Tensor) -> torch.Tensor:
    """The same bits as integers: a copy must not care what a NaN looks like."""
    return pool.view({1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[pool.element_size()])


def _check(keys: torch.Tensor, values: torch.Tensor, sources: torch.Tensor, destinations: torch.Tensor) -> None:
    reasons = []
    if keys.dim() != 3 or keys.shape != values.shape or keys.dtype != values.dtype:
        reasons.append(
            "expected keys and values of one dtype and shape [S, H_kv, D], "
            f"got {keys.dtype} {list(keys.shape)} and {values.dtype} {list(values.shape)}"
        )
    for name, pool in (("keys", keys), ("values", values)):
        if pool.dim() == 3 and (pool.stride(2) != 1 or pool.stride(1) != pool.shape[2]):
            reasons.append(f"expected contiguous entries, got {name} of strides {pool.stride()}")
    if sources.dim() != 1 or sources.shape != destinations.shape:
        reasons.append(
            f"expected as many sources as destinations, got {list(sources.shape)} and {list(destinations.shape)}"
        )
    if sources.dtype != torch.int64 or destinations.dtype != torch.int64:
        reasons.append(f"expected int64 slots, got {sources.dtype} and {destinations.dtype}")
    if len({keys.device, values.device, sources.device, destinations.device}) != 1:
        reasons.append(f"expected one device, got {keys.device}, {sources.device} and {destinations.device}")
    if reasons:
        raise ValueError("\n".join(reasons))


@triton.jit
def copy_kernel(
    keys, values, sources, destinations, key_stride, value_stride, ENTRY: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    """Program i: entry `sources[i]` of keys and values to `destinations[i]`."""
    source, destination = tl.load(sources + tl.program_id(0)), tl.load(destinations + tl.program_id(0))
    for first in range(0, ENTRY, BLOCK):
        at = first + tl.arange(0, BLOCK)
        mask = at < ENTRY
        key = tl.load(keys + source * key_stride + at, mask=mask)
        value = tl.load(values + source * value_stride + at, mask=mask)
        tl.store(keys + destination * key_stride + at, key, mask=mask)
        tl.store(values + destination * value_stride + at, value, mask=mask)
