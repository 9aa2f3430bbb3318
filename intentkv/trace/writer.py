"""The trace's own thread: takes notes from a bounded queue, makes lines of them, writes them.

Nothing that goes wrong here reaches who hands over a note: a full queue, a full disk and a note that cannot be written
cost lines, which are counted, said in the log once, and said in the trace as soon as it can be written again.
"""

from __future__ import annotations

import atexit
import logging
import threading
import time
from collections import deque
from typing import Final

from intentkv.trace.files import RotatingFile
from intentkv.trace.lines import LineMaker, encode
from intentkv.trace.notes import Note

logger = logging.getLogger(__name__)

QUEUE_BYTES: Final = 64 * 2**20
RETRY_SECONDS: Final = 10.0


class TraceWriter:
    """Owner of one trace. Ends with the process, or at `close`.

    Attributes:
        lost: notes that did not become lines, since the start.
    """

    def __init__(
        self,
        files: RotatingFile,
        header: dict[str, object],
        queue_bytes: int = QUEUE_BYTES,
        retry: float = RETRY_SECONDS,
    ) -> None:
        """`header`: fields of the line that begins every file."""
        self.lost = 0
        self._files = files
        self._header = header
        self._queue_bytes = queue_bytes
        self._retry = retry
        self._maker = LineMaker()
        self._notes: deque[Note] = deque()
        self._waiting = 0  # bytes in the queue
        self._changed = threading.Condition()
        self._closing = False
        self._not_before = 0.0  # after an error, the clock at which the disk is tried again
        self._said: set[str] = set()
        self._lost_in_trace = 0  # how many of `lost` the trace itself tells
        self._thread = threading.Thread(target=self._run, name="intentkv-trace", daemon=True)
        self._thread.start()
        atexit.register(self.close)

    def offer(self, note: Note) -> None:
        """Hand over one note; never waits and never raises. What it refers to must not change afterwards."""
        size = note.nbytes
        with self._changed:
            fits = not self._closing and self._waiting + size <= self._queue_bytes
            if fits:
                self._notes.append(note)
                self._waiting += size
                self._changed.notify()
        if not fits:
            self._lose("queue", "the trace is written too slowly, so its queue is full")

    def close(self, seconds: float = 2.0) -> None:
        """Write what is waiting, at most for `seconds`, and end the thread. Calling it again does nothing."""
        with self._changed:
            self._closing = True
            self._changed.notify()
        self._thread.join(seconds)
        atexit.unregister(self.close)

    def _run(self) -> None:
        while (note := self._next()) is not None:
            try:
                self._write(note)
            except OSError as error:
                self._not_before = time.monotonic() + self._retry
                self._lose("disk", f"the trace cannot be written ({error}); tried again every {self._retry:g} s")
                self._give_up_file()
            except Exception:  # noqa: BLE001 (whatever it is, serving goes on; the log has the traceback)
                self._lose("note", "a note could not be made into a line of the trace", traceback=True)
        self._give_up_file()
        if self.lost:
            logger.warning("the trace lacks %d lines in all", self.lost)

    def _next(self) -> Note | None:
        with self._changed:
            while not self._notes:
                if self._closing:
                    return None
                self._changed.wait()
            note = self._notes.popleft()
            self._waiting -= note.nbytes
            return note

    def _write(self, note: Note) -> None:
        if time.monotonic() < self._not_before:
            self._count_lost()
            return
        if self._files.wants_new:
            self._maker.begin_file()
            self._files.begin(encode({**self._header, "time": round(time.time(), 3)}))
        if self.lost > self._lost_in_trace:
            lost = self.lost
            self._files.write(encode({"kind": "lost", "lines": lost - self._lost_in_trace}))
            self._lost_in_trace = lost
        self._files.write(self._maker.line(note))

    def _give_up_file(self) -> None:
        try:
            self._files.close()
        except OSError as error:
            self._say("close", f"the trace's file could not be closed: {error}")

    def _count_lost(self) -> None:
        with self._changed:
            self.lost += 1

    def _lose(self, kind: str, why: str, traceback: bool = False) -> None:
        self._count_lost()
        self._say(kind, f"{why}; lines are lost, and counted in the trace", traceback)

    def _say(self, kind: str, line: str, traceback: bool = False) -> None:
        """Once for each kind of trouble: a full disk stays full for thousands of lines."""
        if kind not in self._said:
            self._said.add(kind)
            logger.error("%s", line, exc_info=traceback)
