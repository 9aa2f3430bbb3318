"""Live views: which slots attention reads when positions of a row have been dropped."""

from dataclasses import dataclass

import numpy as np
import torch


@dataclass(frozen=True)
class _View:
    live: torch.Tensor  # [n] int64: positions of [0, upto) that were not dropped, ascending
    upto: int  # from here on every position is live


class LiveViews:
    """The rows of one pool that have holes, and what is left of them.

    A view stores live *positions*, never slots: SGLang rewrites rows (a later turn, a duplicate found in the radix tree), and
    the slots are looked up in the row as it stands when they are asked for. Rows without holes cost nothing and read as stock.

    Args:
        req_to_token: `[R, ctx]` int32 or int64, logical position -> slot; read, never written.
    """

    def __init__(self, req_to_token: torch.Tensor) -> None:
        self._req_to_token = req_to_token
        self._views: dict[int, _View] = {}

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
        self._views[row] = _View(torch.from_numpy(np.flatnonzero(live)).to(self._req_to_token.device), upto)

    def clear(self, row: int) -> None:
        """Forget the holes of `row`, if it has any."""
        self._views.pop(row, None)

    def slots(self, row: int, seq_len: int) -> torch.Tensor:
        """Slots of the live positions of `row[:seq_len]`, `[live]` int64, in order of position."""
        view = self._views.get(row)
        if view is None:
            return self._req_to_token[row, :seq_len].to(torch.int64)
        live = view.live[: self._live_below(view, seq_len)]
        tail = torch.arange(view.upto, max(seq_len, view.upto), device=live.device)
        return self._req_to_token[row].index_select(0, torch.cat((live, tail))).to(torch.int64)

    def live_len(self, row: int, seq_len: int) -> int:
        """How many of the first `seq_len` positions of `row` are live: the length of `slots(row, seq_len)`."""
        view = self._views.get(row)
        if view is None:
            return seq_len
        return self._live_below(view, seq_len) + max(0, seq_len - view.upto)

    @staticmethod
    def _live_below(view: _View, seq_len: int) -> int:
        if seq_len >= view.upto:
            return len(view.live)
        return int(torch.searchsorted(view.live, seq_len))
