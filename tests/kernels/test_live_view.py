"""Live views: positions in, slots out, whatever happens to the row in between."""

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from intentkv.apply.live_view import GROWTH, LiveRows, LiveViews


@pytest.fixture
def table() -> torch.Tensor:
    return (torch.arange(3)[:, None] * 100 + torch.arange(20)).int()


def test_a_row_without_holes_is_the_row(table: torch.Tensor) -> None:
    views = LiveViews(table)
    assert views.slots(1, 5).tolist() == [100, 101, 102, 103, 104]
    assert views.slots(1, 5).dtype == torch.int64
    assert views.live_len(1, 5) == 5


def test_holes_are_left_out_and_later_positions_are_live(table: torch.Tensor) -> None:
    views = LiveViews(table)
    views.set_holes(1, np.array([0, 2, 3]), 6)
    assert views.slots(1, 6).tolist() == [101, 104, 105]
    assert views.slots(1, 8).tolist() == [101, 104, 105, 106, 107]
    assert views.slots(2, 3).tolist() == [200, 201, 202]


def test_length_agrees_with_slots_at_every_length(table: torch.Tensor) -> None:
    views = LiveViews(table)
    views.set_holes(1, np.array([0, 2, 3, 9]), 12)
    for length in range(21):
        expected = [100 + i for i in range(length) if i not in (0, 2, 3, 9)]
        assert views.slots(1, length).tolist() == expected
        assert views.live_len(1, length) == len(expected)


def test_a_rewritten_row_is_read_anew(table: torch.Tensor) -> None:
    views = LiveViews(table)
    views.set_holes(1, np.array([1]), 3)
    table[1] = torch.arange(20).int() + 500
    assert views.slots(1, 4).tolist() == [500, 502, 503]


def test_a_second_event_replaces_the_first_and_clear_forgets(table: torch.Tensor) -> None:
    views = LiveViews(table)
    views.set_holes(1, np.array([1]), 3)
    views.set_holes(1, np.array([1, 4]), 6)
    assert views.slots(1, 6).tolist() == [100, 102, 103, 105]
    views.set_holes(1, np.arange(0), 6)
    assert views.live_len(1, 6) == 6
    views.clear(1)
    views.clear(1)
    assert views.live_len(1, 6) == 6


@pytest.mark.parametrize("holes", [[2, 1], [1, 1], [-1, 2], [3, 6], [[1], [2]]])
def test_bad_holes_are_refused_and_change_nothing(table: torch.Tensor, holes: list) -> None:
    views = LiveViews(table)
    with pytest.raises(ValueError, match=r"ascending positions in \[0, 6\) for row 1"):
        views.set_holes(1, np.array(holes), 6)
    assert views.live_len(1, 6) == 6


@pytest.mark.parametrize(("row", "upto"), [(3, 6), (-1, 6), (1, 21)])
def test_rows_and_lengths_outside_the_pool_are_refused(table: torch.Tensor, row: int, upto: int) -> None:
    with pytest.raises(ValueError, match="row below 3 and a length of at most 20"):
        LiveViews(table).set_holes(row, np.array([0]), upto)


class Operators(TorchDispatchMode):
    """Names of the operators that run inside."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.names.append(function.__name__.split(".")[0])
        return function(*args, **(kwargs or {}))


def live_rows(
    views: LiveViews, rows: list[int], starts: list[int], ends: list[int], padding: int = 0
) -> LiveRows | None:
    return views.live_rows(np.array(rows), np.array(starts), np.array(ends), torch.tensor(rows + [0] * padding))


def test_live_rows_are_the_slots_of_every_request_and_of_the_padding(table: torch.Tensor) -> None:
    views = LiveViews(table)
    views.set_holes(2, np.array([0, 2, 3]), 6)
    live = live_rows(views, [1, 2], [4, 8], [5, 10], padding=1)
    assert live is not None and live.dropped.tolist() == [0, 3] and live.dropped_on_device.tolist() == [0, 3, 0]
    assert live.table.shape == (3, 7) and live.table.dtype == table.dtype
    assert live.table[0, :5].tolist() == views.slots(1, 5).tolist()
    assert live.table[1, :7].tolist() == views.slots(2, 10).tolist()
    assert live.table[2, 0] == table[0, 0]


def test_live_rows_agree_with_slots_at_every_start(table: torch.Tensor) -> None:
    views = LiveViews(table)
    views.set_holes(1, np.array([0, 2, 3, 9]), 12)
    for start in range(1, 19):
        live = live_rows(views, [1], [start], [start + 1])
        expected = [*views.slots(1, start).tolist(), 100 + start]  # the token being computed sees itself
        assert live is not None and live.table[0, : len(expected)].tolist() == expected
        assert live.dropped.tolist() == [start + 1 - len(expected)]


def test_rows_without_holes_are_read_as_they_stand(table: torch.Tensor) -> None:
    views = LiveViews(table)
    assert not views.has_holes(np.array([0, 1, 2])) and live_rows(views, [1], [4], [5]) is None
    views.set_holes(2, np.array([5]), 6)
    assert not views.has_holes(np.array([0, 1])) and views.has_holes(np.array([1, 2]))
    assert live_rows(views, [1], [4], [5]) is None
    assert live_rows(views, [2], [5], [6]) is None  # position 5 is being computed, so it is no hole yet
    views.clear(2)
    assert not views.has_holes(np.array([2])) and live_rows(views, [2], [7], [8]) is None


def test_a_growing_row_is_one_gather_a_step_and_follows_every_change() -> None:
    table = torch.arange(2 * 4 * GROWTH).view(2, -1).int()
    views = LiveViews(table)
    views.set_holes(1, np.arange(10), 100)
    for length in range(101, 101 + 2 * GROWTH):
        with Operators() as ran:
            live = live_rows(views, [1], [length - 1], [length])
        assert live is not None and live.table[0, : length - 10].tolist() == table[1, 10:length].tolist()
        rebuilt = "masked_scatter_" in ran.names
        assert rebuilt == ((length - 101) % (GROWTH + 1) == 0)
    table[1] += 7
    views.set_holes(1, np.arange(20), 100)
    live = live_rows(views, [1], [length - 1], [length])
    assert live is not None and live.table[0, : length - 20].tolist() == table[1, 20:length].tolist()


def test_nothing_is_read_back_from_the_device(table: torch.Tensor) -> None:
    """Operators whose result only the device knows, or that copy to the host, would make the scheduler wait for the GPU."""
    views = LiveViews(table)
    views.set_holes(2, np.array([0, 2, 3]), 6)
    rows, where = (np.array([1, 2]), np.array([4, 8]), np.array([5, 10])), torch.tensor([1, 2, 0])
    with Operators() as ran:
        live = views.live_rows(*rows, where)
    assert live is not None and "index" in ran.names
    assert not {"_local_scalar_dense", "nonzero", "masked_select", "_unique2", "item", "equal"} & set(ran.names)
