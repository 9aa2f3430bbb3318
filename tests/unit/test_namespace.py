"""Positions, segments, records and the guard: the host-side arithmetic behind a pruned session's namespace."""

from array import array

import numpy as np
import pytest

from intentkv.apply.guard import SharedText
from intentkv.apply.namespace import PADDING, UNREAD, NamespaceNames, Segment, entry_ids
from intentkv.apply.rows import NO_POSITIONS, common_prefix, droppable, live_positions, tombstones
from intentkv.engine.session_records import BRANCHES, UNPRUNED_BRANCHES, Record, SessionRecords


def positions(*values: int) -> np.ndarray:
    return np.array(values, dtype=np.int64)


@pytest.mark.parametrize("page_size", [1, 16, 64])
def test_tombstones_lie_in_the_dead_page_and_keep_page_arithmetic(page_size: int) -> None:
    marks = tombstones(np.arange(4 * page_size), page_size)
    assert (marks < page_size).all()
    assert ((marks + 1) % page_size == np.arange(1, 4 * page_size + 1) % page_size).all()


def test_droppable_keeps_the_page_of_the_last_token() -> None:
    everything = np.arange(100)
    assert droppable(everything, NO_POSITIONS, 33, 16).tolist() == list(range(32))
    assert droppable(everything, NO_POSITIONS, 32, 16).tolist() == list(range(16))
    assert droppable(everything, NO_POSITIONS, 3, 1).tolist() == [0, 1]
    assert droppable(everything, NO_POSITIONS, 0, 16).tolist() == []


def test_droppable_takes_whole_pages_once() -> None:
    wanted = np.concatenate((np.arange(15, 33), np.arange(48, 64)))[::-1]
    assert droppable(wanted, NO_POSITIONS, 100, 16, whole_pages=True).tolist() == [*range(16, 32), *range(48, 64)]
    assert droppable(wanted, np.arange(16, 32), 100, 16, whole_pages=True).tolist() == list(range(48, 64))
    assert droppable(positions(5, 3, -1, 5), positions(3), 100, 1, whole_pages=True).tolist() == [5]


def test_droppable_takes_single_positions_where_attention_reads_them() -> None:
    wanted = np.concatenate((np.arange(15, 33), np.arange(48, 120)))[::-1]
    assert droppable(wanted, positions(17), 100, 16).tolist() == [15, 16, *range(18, 33), *range(48, 96)]


def test_live_positions_count_only_holes_inside() -> None:
    assert live_positions(4, 10, positions(1, 4, 7, 12)).tolist() == [5, 6, 8, 9]
    assert live_positions(4, 4, positions(4)).tolist() == []


def test_namespace_entries_name_position_and_token() -> None:
    tokens = positions(7, 7, 7, 7)
    ids = entry_ids(positions(0, 2, 3, UNREAD), tokens)
    assert len(set(ids.tolist())) == 4, "equal tokens at different positions are different entries"
    assert ids[:3].min() >= 1 << 32, "no key of plain token ids may match an entry"
    assert ids[3] == PADDING
    assert ids[1:3].tolist() == entry_ids(positions(2, 3), tokens).tolist()


TOKENS = np.arange(100, 140)


def path(*order: int, end: int = 12, behind: np.ndarray | None = None) -> Segment:
    holes = positions(1, 6) if behind is None else behind
    return Segment("n", end, entry_ids(positions(*order), TOKENS), holes)


def test_namespace_admits_only_its_own_holes() -> None:
    segment = path(4, 5, 7, 8, 9, 10, 11)
    assert segment.positions().tolist() == [4, 5, 7, 8, 9, 10, 11]
    assert segment.admits(positions(1, 6))
    assert not segment.admits(positions(6)) and not segment.admits(positions(1, 6, 9))
    cut = segment.cut(6, 1)
    assert cut.positions().tolist() == [4, 5] and cut.admits(positions(1))
    assert Segment.of_text(8).admits(NO_POSITIONS) and not Segment.of_text(8).admits(positions(2))


def test_namespace_of_packed_pages_is_cut_behind_the_last_entry_that_is_read() -> None:
    segment = path(10, 11, 4, 9, 7, 3, 8, UNREAD)
    assert segment.admits(positions(1, 6)), "padding is no token of another text"
    cut = segment.cut(8, 4)
    assert cut.positions().tolist() == [UNREAD, UNREAD, 4, UNREAD, 7, 3, UNREAD, UNREAD]
    assert cut.key() == segment.key(), "what the tree is asked for is what it has"
    assert not cut.admits(positions(1, 6)), "others may go on from what this text does not read"
    assert segment.cut(5, 4).positions().tolist() == [UNREAD, UNREAD, 4, UNREAD, UNREAD, 3, UNREAD, UNREAD]
    assert segment.cut(3, 4).key() == array("q")
    assert segment.held(4, 12).positions().tolist() == [10, 11, 4, 9]
    assert segment.held(4, 10).positions().tolist() == [UNREAD, UNREAD, 4, 9]


def test_namespace_grows_behind_what_it_has() -> None:
    segment = path(10, 11, 4, UNREAD).grown(16, entry_ids(np.arange(12, 16), TOKENS))
    assert segment.positions().tolist() == [10, 11, 4, UNREAD, 12, 13, 14, 15] and segment.end == 16


def test_namespace_names_are_never_used_twice() -> None:
    names = NamespaceNames()
    assert len({names.fresh() for _ in range(100)}) == 100


def test_guard_finds_the_longest_shared_beginning_of_others() -> None:
    guard = SharedText()
    guard.note("a", None, positions(1, 2, 3, 4, 5))
    guard.note("b", None, positions(1, 2, 3, 9))
    guard.note("other tenant", "salt", positions(1, 2, 3, 4, 5))
    assert guard.shared("c", None, positions(1, 2, 3, 4, 6), beyond=0) == 4
    assert guard.shared("a", None, positions(1, 2, 3, 4, 5), beyond=0) == 3
    assert guard.shared("a", None, positions(1, 2, 3, 4, 5), beyond=4) == 4
    guard.forget("b")
    assert guard.shared("a", None, positions(1, 2, 3, 4, 5), beyond=1) == 1


def test_guard_forgets_whom_it_has_not_seen_for_longest() -> None:
    guard = SharedText(max_users=2)
    for user in "abac":
        guard.note(user, None, positions(*map(ord, user * 4)))
    assert guard.shared("x", None, positions(*map(ord, "bbbb")), beyond=0) == 0
    assert guard.shared("x", None, positions(*map(ord, "aaaa")), beyond=0) == 4


def record(*tokens: int, holes: np.ndarray = NO_POSITIONS) -> Record:
    return Record("s", np.array(tokens, dtype=np.int32), holes, ())


def test_session_records_keep_texts_that_went_another_way() -> None:
    records = SessionRecords()
    one, longer, branch = record(1, 2), record(1, 2, 3), record(1, 4)
    for each in (one, longer, branch):
        assert records.note("s", each) == []
    assert records.of("s") == (branch, longer), "a continued text is replaced, a branch is kept"
    assert records.of("unknown") == ()


def test_session_records_hand_back_the_texts_that_they_forget() -> None:
    """The oldest first; those of before the first event, which no match looks at, make room for none of the others."""
    records = SessionRecords()
    pruned = [record(1, 9, n, holes=positions(0)) for n in range(BRANCHES + 1)]
    unpruned = [record(2, n) for n in range(UNPRUNED_BRANCHES + 1)]
    pushed_out = [records.note("s", each) for each in (*unpruned, *pruned)]
    assert pushed_out[UNPRUNED_BRANCHES] == [unpruned[0]] and pushed_out[-1] == [pruned[0]]
    assert sum(map(len, pushed_out)) == 2
    assert records.of("s") == (*pruned[:0:-1], *unpruned[:0:-1])


def test_session_records_are_bounded() -> None:
    records = SessionRecords(max_sessions=2)
    for session in ("a", "b", "a", "c"):
        records.note(session, record(1))
    assert len(records) == 2 and records.of("b") == () and records.of("a")


def test_common_prefix() -> None:
    assert common_prefix(positions(1, 2, 3), positions(1, 2)) == 2
    assert common_prefix(positions(1, 2, 3), positions(1, 5, 3)) == 1
    assert common_prefix(positions(), positions(1)) == 0
