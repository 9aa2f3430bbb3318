"""The trace: lines that say what was decided, in files that stay small and private, and never an error to the caller."""

from __future__ import annotations

import base64
import errno
import json
import os
import stat
import threading
from array import array
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from intentkv.keep.select import candidates
from intentkv.observe.spans import Spans
from intentkv.trace.files import RotatingFile
from intentkv.trace.lines import BEST, DROPPED_BEFORE, FORCED, LineMaker, score_bytes
from intentkv.trace.notes import EventNote, FinishNote, Origin, Pool
from intentkv.trace.writer import TraceWriter

HEADER: dict[str, object] = {"kind": "start", "version": 1}
POOL = Pool(free=900, evictable=100)


def origin(session: str = "agent", rid: str = "r") -> Origin:
    return Origin(time=12.3456, rid=rid, session=session, key=f"{session}-key", scorer="intent", budget="25%")


def event(length: int = 12, holes: tuple[int, ...] = (3,), dropped: tuple[int, ...] = (4, 6)) -> EventNote:
    forced = np.zeros(length, np.bool_)
    forced[[0, length - 1]] = True
    gone = np.array(holes, np.int64)
    scores = np.arange(len(candidates(forced, gone)), dtype=np.float32)
    return EventNote(origin(), POOL, forced, gone, scores, np.array(dropped, np.int64), freed=2, score_ms=1.25)


def finish(tokens: list[int], answer: list[int], session: str = "agent", holes: tuple[int, ...] = ()) -> FinishNote:
    counts = (
        "events",
        "logical_tokens",
        "live_tokens",
        "dropped_tokens",
        "freed_slots",
        "reused_prefix_tokens",
        "score_ms",
    )
    return FinishNote(
        origin(session), POOL, array("q", tokens), array("q", answer), Spans(1, (2, 4)), np.array(holes, np.int64),
        dict.fromkeys(counts, 7), "stop", 0.5,
    )  # fmt: skip


def lines(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for path in sorted(folder.iterdir()) for line in path.read_text().splitlines()]


def write(folder: Path, *notes: EventNote | FinishNote, **sizes: int) -> TraceWriter:
    writer = TraceWriter(RotatingFile(folder, **sizes), HEADER)
    for note in notes:
        writer.offer(note)
    writer.close()
    return writer


class TestLines:
    def test_an_event_says_what_became_of_every_position(self) -> None:
        line = json.loads(LineMaker().line(event()))
        assert (line["length"], line["candidates"], line["dropped"], line["kept"], line["freed"]) == (12, 9, 2, 9, 2)
        assert (line["session"], line["turn"], line["budget"], line["time"]) == ("agent", 1, "25%", 12.346)
        values = list(base64.b64decode(line["scores"]))
        assert [values[0], values[11]] == [FORCED, FORCED] and values[3] == DROPPED_BEFORE
        assert values[1:3] == [0, BEST // 8] and values[10] == BEST
        assert np.flatnonzero(np.unpackbits(np.frombuffer(base64.b64decode(line["drop"]), np.uint8))).tolist() == [4, 6]

    def test_scores_are_ranks_so_infinity_and_ties_are_fine(self) -> None:
        scores = np.array([np.inf, 1e-30, 1e-30, -5, np.inf], np.float32)
        values = score_bytes(scores, np.zeros(5, np.bool_), np.empty(0, np.int64))
        assert values.tolist() == [3 * BEST // 4, BEST // 4, BEST // 4, 0, 3 * BEST // 4]
        assert score_bytes(scores[:1], np.zeros(1, np.bool_), np.empty(0, np.int64)).tolist() == [0]

    def test_a_turn_writes_only_the_tokens_that_its_session_has_not_shown(self) -> None:
        maker = LineMaker()
        turns = [finish([1, 2, 3], [4]), finish([9], [], "other"), finish([1, 2, 3, 4, 5], [6], holes=(1, 3))]
        first, _, second = (json.loads(maker.line(note)) for note in turns)
        assert (first["from"], first["tokens"], first["turn"]) == (0, [1, 2, 3, 4], 1)
        assert (second["from"], second["tokens"], second["turn"]) == (4, [5, 6], 2)
        assert np.unpackbits(np.frombuffer(base64.b64decode(second["holes"]), np.uint8))[:6].tolist() == [
            0,
            1,
            0,
            1,
            0,
            0,
        ]
        edited = json.loads(maker.line(finish([1, 2, 8], [])))
        assert (edited["from"], edited["tokens"]) == (2, [8])
        maker.begin_file()
        assert json.loads(maker.line(finish([1, 2, 8], [])))["from"] == 0

    def test_memory_of_sessions_is_bounded_in_tokens(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("intentkv.trace.lines.REMEMBERED_TOKENS", 5)
        maker = LineMaker()
        for session in ("a", "b", "a"):
            line = json.loads(maker.line(finish([1, 2, 3], [], session)))
        assert line["from"] == 0  # "b" took the room of "a"
        assert json.loads(maker.line(finish([1, 2, 3, 4], [], "a")))["from"] == 3

    def test_no_name_breaks_a_line(self) -> None:
        line = LineMaker().line(finish([1], [], "two\nlines\u2028\x00\ud800</script>"))
        assert line.count(b"\n") == 1 and line.isascii()
        assert json.loads(line)["session"] == "two\nlines\u2028\x00\ud800</script>"


class TestFiles:
    def test_only_the_owner_reads_them(self, tmp_path: Path) -> None:
        folder = tmp_path / "new" / "trace"
        write(folder, finish([1], [2]))
        (file,) = folder.iterdir()
        assert stat.S_IMODE(file.stat().st_mode) == 0o600 and stat.S_IMODE(folder.stat().st_mode) == 0o700
        assert [line["kind"] for line in lines(folder)] == ["start", "finish"]

    def test_rotated_files_stand_alone_and_the_oldest_go(self, tmp_path: Path) -> None:
        mine = tmp_path / "notes.jsonl"
        mine.write_text("x" * 5000)
        notes = [finish(list(range(200)), [number]) for number in range(60)]
        write(tmp_path, *notes, file_bytes=1500, folder_bytes=6000)
        files = sorted(tmp_path.glob("intentkv-*.jsonl"), key=lambda path: int(path.stem.rsplit("-", 1)[1]))
        assert 2 <= len(files) <= 6000 // 1500 and mine.exists()
        for file in files:
            head, first, *_ = map(json.loads, file.read_text().splitlines())
            assert head["kind"] == "start" and first["from"] == 0
        assert json.loads(files[-1].read_text().splitlines()[-1])["tokens"] == [59]


class TestTrouble:
    def test_a_full_queue_costs_lines_which_are_counted_and_said(
        self, tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        entered, go_on = threading.Event(), threading.Event()
        real = os.write

        def slow(file: int, data: bytes) -> int:
            entered.set()
            assert go_on.wait(30)
            return real(file, data)

        monkeypatch.setattr("intentkv.trace.files.os.write", slow)
        writer = TraceWriter(RotatingFile(tmp_path), HEADER, queue_bytes=3 * finish([1], []).nbytes)
        writer.offer(finish([1], []))
        assert entered.wait(30)
        for _ in range(8):
            writer.offer(finish([1], []))
        go_on.set()
        writer.close(30)
        assert writer.lost == 5 and caplog.text.count("queue is full") == 1
        assert [line["kind"] for line in lines(tmp_path)] == ["start", "lost", "finish", "finish", "finish", "finish"]
        assert lines(tmp_path)[1]["lines"] == 5

    def test_a_full_disk_is_logged_once_and_written_to_again_when_there_is_room(
        self, tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        real, calls = os.write, 0

        def full(file: int, data: memoryview) -> int:
            nonlocal calls
            calls += 1
            if 2 <= calls <= 6:
                if calls % 2:
                    return real(file, data[:10])  # a part of the line gets in
                raise OSError(errno.ENOSPC, "No space left on device")
            return real(file, data)

        monkeypatch.setattr("intentkv.trace.files.os.write", full)
        writer = TraceWriter(RotatingFile(tmp_path), HEADER, retry=0)
        for _ in range(6):
            writer.offer(finish([1], []))
        writer.close(30)
        assert caplog.text.count("No space left on device") == 1 and f"lacks {writer.lost} lines" in caplog.text
        assert writer.lost > 0
        last = max(tmp_path.iterdir(), key=lambda path: int(path.stem.rsplit("-", 1)[1]))
        found = [json.loads(line) for line in last.read_text().splitlines()]
        assert [line["kind"] for line in found[:2]] == ["start", "lost"] and found[1]["lines"] == writer.lost
        assert found[2]["from"] == 0 and len(found) == 8 - writer.lost

    def test_a_folder_that_vanished_never_reaches_the_caller(
        self, tmp_path: Path, caplog: pytest.LogCaptureFixture
    ) -> None:
        blocked = tmp_path / "file"
        blocked.write_text("in the way")
        writer = write(blocked, finish([1], []), finish([1], []))
        assert writer.lost == 2 and caplog.text.count("the trace cannot be written") == 1

    def test_a_note_that_cannot_be_written_costs_itself_only(
        self, tmp_path: Path, caplog: pytest.LogCaptureFixture
    ) -> None:
        bad = event()
        object.__setattr__(bad, "scores", bad.scores[:2])  # does not fit its candidates
        writer = write(tmp_path, bad, finish([1], []))
        assert writer.lost == 1 and "Traceback" in caplog.text
        assert [line["kind"] for line in lines(tmp_path)] == ["start", "lost", "finish"]

    def test_offers_after_the_end_are_counted(self, tmp_path: Path) -> None:
        writer = write(tmp_path)
        writer.offer(finish([1], []))
        assert writer.lost == 1 and not list(tmp_path.iterdir())
