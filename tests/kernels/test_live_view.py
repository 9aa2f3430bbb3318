"""Live views: positions in, slots out, whatever happens to the row in between."""

import numpy as np
import pytest
import torch

from intentkv.apply.live_view import LiveViews


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
