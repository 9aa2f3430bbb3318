"""The ledger: who owns each page of the KV pool, checked before every free.

    free --alloc--> held by a request --insert--> owned by the tree --evict, withdraw--> held --free--> free

Only a held page may be freed. The dead page (page 0) is nobody's: it is never allocated and never freed. One byte a
page on the pool's device; an entry costs one gather and one scatter.
"""

from collections.abc import Callable, Mapping
from typing import Any, Final

import numpy as np
import torch

FREE: Final = 0
HELD: Final = 1
TREE: Final = 2
DEAD: Final = 3
_STATES: Final = ("already free", "held", "still owned by the tree", "the dead page")


class LedgerError(RuntimeError):
    """A page was about to be freed that its owner had not given up."""


class SlotLedger:
    """Watches one allocator.

    On a CPU pool a wrong free raises before it happens. On an accelerator a verdict would cost a wait for the device in
    the scheduler's loop, so wrong frees are counted there and reported by the next `audit`.

    Args:
        allocator: SGLang's token or page allocator. Its methods that hand out or take back slots are wrapped on the
            instance: evictions, duplicates, finished requests and our own frees all pass through them.
    """

    def __init__(self, allocator: Any) -> None:
        self._allocator = allocator
        self._page_size: int = allocator.page_size
        self._pages: int = allocator.size // self._page_size
        self._device = torch.device(allocator.device)
        self._flushing = False
        for name in ("alloc", "alloc_extend", "alloc_decode"):
            setattr(allocator, name, self._after_alloc(getattr(allocator, name)))
        allocator.free = self._before_free(allocator.free, self._page_size)
        if self._page_size > 1:
            allocator.free_page_ids = self._before_free(allocator.free_page_ids, 1)
        allocator.free_group_end = self._while_flushing(allocator.free_group_end)
        allocator.clear = self._after_clear(allocator.clear)
        self.reset()

    def reset(self) -> None:
        """All pages are free again."""
        self._owner = torch.full((self._pages + 1,), FREE, dtype=torch.uint8, device=self._device)
        self._owner[0] = DEAD
        self._stamp = torch.zeros(self._pages + 1, dtype=torch.int64, device=self._device)
        self._wrong = torch.zeros((), dtype=torch.int64, device=self._device)

    def enter_tree(self, slots: torch.Tensor) -> None:
        """The radix tree has taken over whole pages of `slots`, `[n]` int64."""
        self._owner[self._whole_pages(slots)] = TREE

    def leave_tree(self, slots: torch.Tensor) -> None:
        """The radix tree has handed whole pages of `slots`, `[n]` int64, to a caller who frees or files them next."""
        self._owner[self._whole_pages(slots)] = HELD

    def check_held(self, slots: torch.Tensor) -> None:
        """Make sure that `slots`, `[n]` int64, whose contents are about to be moved, belong to a request alone.

        Raises:
            LedgerError: on a CPU pool. On an accelerator the fault is counted.
        """
        state = self._owner[self._pages_of(slots)]
        self._report(
            state != HELD,
            lambda i: f"move of slot {int(slots[i])}: expected a held page, but it is {_STATES[int(state[i])]}",
        )

    def check_unmapped(self, slots: torch.Tensor, rows: torch.Tensor, lengths: torch.Tensor, by: str) -> None:
        """Make sure that no row of another request maps pages of `slots` that are about to be freed or moved.

        Args:
            slots: `[n]` int64.
            rows: `[R, ctx]`, the other requests' rows.
            lengths: `[R]` int64, how much of each row is in use.
            by: who frees, for the message.

        Raises:
            LedgerError: on a CPU pool. On an accelerator the fault is counted.
        """
        going = torch.zeros(self._pages + 1, dtype=torch.bool, device=self._device)
        going[self._pages_of(slots)] = True
        used = torch.arange(rows.shape[1], device=self._device) < lengths[:, None]
        mapped = (going[self._pages_of(rows)] & used).any(dim=1)
        self._report(
            mapped, lambda i: f"{by}: slots to be freed or moved are mapped by another row, the {i}. of {len(rows)}"
        )

    def audit(self, free: torch.Tensor, tree: torch.Tensor, private: Mapping[str, torch.Tensor]) -> list[str]:
        """Count every page's owners and compare them with the book. Waits for the device.

        Args:
            free: `[n]` page ids of the free list, pending frees included.
            tree: `[n]` slots of every node of the tree.
            private: request -> page ids that it alone owns.

        Returns:
            What is wrong, one line each; empty when every page but the dead one has exactly one owner.
        """
        owners = {"free list": _numpy(free), "tree": np.unique(_numpy(tree) // self._page_size)}
        owners |= {name: _numpy(pages) for name, pages in private.items()}
        faults = [f"{int(self._wrong)} wrong frees were counted"] if int(self._wrong) else []
        if len(_numpy(tree)) != len(np.unique(_numpy(tree))):
            faults.append("a slot stands twice in the tree")
        count = np.zeros(self._pages + 1, dtype=np.int64)
        for name, pages in owners.items():
            if (pages == 0).any():
                faults.append(f"{name} owns the dead page")
            np.add.at(count, pages, 1)
        for page in np.flatnonzero(count[1:] != 1)[:8] + 1:
            names = [name for name, pages in owners.items() if page in pages]
            faults.append(f"page {page}: expected one owner, found {count[page]} ({', '.join(names) or 'nobody'})")
        book = _numpy(self._owner)
        for state, pages in ((FREE, owners["free list"]), (TREE, owners["tree"])):
            wrong = pages[book[pages] != state]
            if len(wrong):
                faults.append(f"page {wrong[0]}: the book says {_STATES[book[wrong[0]]]}, expected {_STATES[state]}")
        return faults

    def _pages_of(self, slots: torch.Tensor) -> torch.Tensor:
        return slots if self._page_size == 1 else slots // self._page_size

    def _whole_pages(self, slots: torch.Tensor) -> torch.Tensor:
        """The pages of `slots` that hold whole pages in page order, each once."""
        return self._pages_of(slots[:: self._page_size])

    def _report(self, wrong: torch.Tensor, message: Callable[[int], str]) -> None:
        """Refuse on a CPU pool, count elsewhere. `wrong` is `[n]` bool; `message` gets the index of the first fault."""
        if self._device.type != "cpu":
            self._wrong += wrong.sum()
        elif bool(wrong.any()):
            raise LedgerError(message(int(wrong.to(torch.uint8).argmax())))

    def _check_free(self, pages: torch.Tensor, repeats_allowed: bool) -> None:
        state = self._owner[pages]
        self._report(
            state != HELD,
            lambda i: f"free of page {int(pages[i])}: expected a held page, but it is {_STATES[int(state[i])]}",
        )
        if not repeats_allowed:
            order = torch.arange(len(pages), device=self._device)
            self._stamp[pages] = order  # of two equal pages only one stamp survives
            self._report(self._stamp[pages] != order, lambda i: f"page {int(pages[i])} stands twice in one free")
        self._owner[pages] = FREE

    def _after_alloc(self, alloc: Callable[..., torch.Tensor | None]) -> Callable[..., torch.Tensor | None]:
        def watched(*args: Any, **kwargs: Any) -> torch.Tensor | None:
            slots = alloc(*args, **kwargs)
            if slots is not None:
                self._owner[self._pages_of(slots)] = HELD
            return slots

        return watched

    def _before_free(self, free: Callable[[torch.Tensor], None], slots_a_page: int) -> Callable[[torch.Tensor], None]:
        def watched(index: torch.Tensor) -> None:
            # The end of a free group passes on what was checked when it entered the group.
            if index.numel() and not self._flushing:
                self._check_free(index // slots_a_page, repeats_allowed=slots_a_page > 1)
            free(index)

        return watched

    def _while_flushing(self, end: Callable[[], None]) -> Callable[[], None]:
        def watched() -> None:
            self._flushing = True
            try:
                end()
            finally:
                self._flushing = False

        return watched

    def _after_clear(self, clear: Callable[[], None]) -> Callable[[], None]:
        def watched() -> None:
            clear()
            self.reset()

        return watched


def _numpy(tensor: torch.Tensor) -> np.ndarray:
    return tensor.cpu().numpy()
