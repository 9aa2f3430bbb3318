"""How much of a long history is looked at in one go, so that temporaries do not grow with it."""

from collections.abc import Iterator

WORKSPACE_BYTES = 24 * 2**20  # leaves the allocator's rounding room below 32 MiB


def chunks(n: int, bytes_each: int) -> Iterator[slice]:
    """Slices of [0, n), in order, each as long as `WORKSPACE_BYTES` allows for `bytes_each` an item, and at least 1."""
    step = max(1, WORKSPACE_BYTES // bytes_each)
    for start in range(0, n, step):
        yield slice(start, min(start + step, n))
