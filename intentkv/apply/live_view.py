"""Live views: which slots attention reads when positions of a row have been dropped."""

from dataclasses import dataclass
from typing import Final

import numpy as np
import torch

GROWTH: Final = 256  # positions; a cached map has room for this many more decode steps


@dataclass(frozen=True)
class _View:
    live: torch.Tensor  # [n] int64: positions of [0, upto) that were not dropped, ascending
    holes: np.ndarray  # [h] int64: the other positions of [0, upto), on the host
    upto: int  # from here on every position is live


@dataclass(frozen=True)
class LiveRows:
    """The rows of one forward without their tombstones.

    Attributes:
        table: `[P, W]` int32, slots of the live positions of each request, in order of position; what follows the last is
            arbitrary.
        dropped: `[B]` int64 on the host, how many positions of each request attention does not see.
        dropped_on_device: `[P]` int32, the same beside the table; 0 for padding.
    """

    table: torch.Tensor
    dropped: np.ndarray
    dropped_on_device: torch.Tensor


@dataclass(frozen=True)
class _Map:
    key: tuple[bytes, bytes, bytes, int]
    positions: torch.Tensor  # [P, C] int64: live index -> logical position
    dropped: torch.Tensor  # [P] int32


class LiveViews:
    """The rows of one pool that have holes, and what is left of them.

    A view stores live *positions*, never slots: SGLang rewrites rows (a later turn, a duplicate found in the radix tree), and
    the slots are looked up in the row as it stands when they are asked for. Rows without holes cost nothing and read as stock.

    What a view keeps on the device is written where rows are written and read where rows are read, so whatever orders the
    reads and writes of `req_to_token` across streams orders these too.

    Args:
        req_to_token: `[R, ctx]` int32 or int64, logical position -> slot; read, never written.

    Attributes:
        running: `[B]` int64 on the host, rows of the requests of the forward that is being prepared; None outside one.
    """

    running: np.ndarray | None = None

    def __init__(self, req_to_token: torch.Tensor) -> None:
        self._req_to_token = req_to_token
        self._views: dict[int, _View] = {}
        rows = req_to_token.shape[0]
        self._dropped = np.zeros(rows, np.int64)
        self._upto = np.zeros(rows, np.int64)
        self._version = np.zeros(rows, np.int64)
        self._events = 0
        self._map: _Map | None = None

    def set_holes(self, row: int, holes: np.ndarray, upto: int) -> None:
        """Replace the holes of `row`; an empty array clears it.

        Args:
            row: index into `req_to_token`.
            holes: `[n]` int64, ascending, dropped positions, all below `upto`.
            upto: logical length that the decision covered; every position from here on is live.

        Raises:
            ValueError: holes that are unsorted, repeated or outside `[0, upto)`, or a row or length outside the pool.
        """
        rows, context = self._req_to_token.shape
        if not (0 <= row < rows and 0 <= upto <= context):
            raise ValueError(
                f"expected a row below {rows} and a length of at most {context}, got row {row}, length {upto}"
            )
        if holes.size == 0:
            self.clear(row)
            return
        if holes.ndim != 1 or holes[0] < 0 or holes[-1] >= upto or (np.diff(holes) <= 0).any():
            raise ValueError(f"expected ascending positions in [0, {upto}) for row {row}, got {holes}")
        live = np.ones(upto, dtype=bool)
        live[holes] = False
        on_device = torch.from_numpy(np.flatnonzero(live)).to(self._req_to_token.device)
        self._views[row] = _View(on_device, holes.copy(), upto)
        self._events += 1
        self._dropped[row], self._upto[row], self._version[row] = len(holes), upto, self._events

    def clear(self, row: int) -> None:
        """Forget the holes of `row`, if it has any."""
        if self._views.pop(row, None) is not None:
            self._dropped[row] = 0

    def slots(self, row: int, seq_len: int) -> torch.Tensor:
        """Slots of the live positions of `row[:seq_len]`, `[live]` int64, in order of position."""
        view = self._views.get(row)
        if view is None:
            return self._req_to_token[row, :seq_len].to(torch.int64)
        live = view.live[: min(seq_len, view.upto) - self._holes_below(view, seq_len)]
        tail = torch.arange(view.upto, max(seq_len, view.upto), device=live.device)
        return self._req_to_token[row].index_select(0, torch.cat((live, tail))).to(torch.int64)

    def live_len(self, row: int, seq_len: int) -> int:
        """How many of the first `seq_len` positions of `row` are live: the length of `slots(row, seq_len)`."""
        view = self._views.get(row)
        return seq_len if view is None else seq_len - self._holes_below(view, seq_len)

    def has_holes(self, rows: np.ndarray) -> bool:
        """Whether a position of any of `rows`, `[B]` int64, was dropped."""
        return bool(self._views) and bool(self._dropped[rows].any())

    def live_rows(self, rows: np.ndarray, starts: np.ndarray, ends: np.ndarray, where: torch.Tensor) -> LiveRows | None:
        """The rows of one forward as attention is to read them, or None if all of them are to be read as they stand.

        Nothing is read back from the device. While the requests of a batch and their holes stay the same, a call costs one
        gather of the rows.

        Args:
            rows: `[B]` int64, rows of the requests.
            starts: `[B]` int64, logical length before this forward. Holes from there on do not count yet: the tokens
                that a forward computes see each other.
            ends: `[B]` int64, logical length with the tokens of this forward.
            where: `[P]` int64 on the device of the rows, the same rows and then those of P - B padding requests.
        """
        dropped = self._dropped[rows]
        for lane in np.flatnonzero((dropped > 0) & (starts < self._upto[rows])):
            dropped[lane] = self._holes_below(self._views[int(rows[lane])], int(starts[lane]))
        if not dropped.any():
            return None
        width = int((ends - dropped).max())
        positions = self._positions(rows, starts, dropped, width, len(where))
        table = self._req_to_token[where[:, None], positions.positions[:, :width]]
        return LiveRows(table, dropped, positions.dropped)

    def _positions(self, rows: np.ndarray, starts: np.ndarray, dropped: np.ndarray, width: int, padded: int) -> _Map:
        """Map of live index to position for every request of a batch; the last one is kept.

        With `h` holes, index `i` is position `i + h`, but for the indices below the decision, which the view lists.
        """
        key = (rows.tobytes(), self._version[rows].tobytes(), dropped.tobytes(), padded)
        if self._map is not None and self._map.key == key and width <= self._map.positions.shape[1]:
            return self._map
        device = self._req_to_token.device
        capacity = width + GROWTH
        numbers = np.zeros((2, padded), np.int32)
        numbers[0, : len(rows)] = dropped
        numbers[1, : len(rows)] = np.where(dropped > 0, np.minimum(starts, self._upto[rows]) - dropped, 0)
        shift, listed = torch.from_numpy(numbers).to(device, non_blocking=True)
        lives = [self._views[int(rows[lane])].live[: numbers[1, lane]] for lane in np.flatnonzero(dropped)]
        index = torch.arange(capacity, device=device)
        positions = (index + shift[:, None]).clamp_(max=self._req_to_token.shape[1] - 1)
        positions.masked_scatter_(index < listed[:, None], torch.cat(lives))
        self._map = _Map(key, positions, shift)
        return self._map

    @staticmethod
    def _holes_below(view: _View, seq_len: int) -> int:
        return int(np.searchsorted(view.holes, seq_len))
