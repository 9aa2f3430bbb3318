"""Files of a trace: made for their owner alone, bounded in size each and together."""

from __future__ import annotations

import contextlib
import os
import re
import stat
import time
from pathlib import Path
from typing import Final

FILE_BYTES: Final = 32 * 2**20
FOLDER_BYTES: Final = (
    256 * 2**20
)  # of all trace files in a folder, those of earlier servers and other replicas included
_NAME: Final = re.compile(r"intentkv-\d{8}T\d{6}-\d+-\d+\.jsonl")


class RotatingFile:
    """Appends whole lines to a file, and goes on in a new one when it is full. The oldest files of the folder go.

    Files are readable and writable by their owner only: session names and token ids are a tenant's data. The folder is
    made so too where it does not exist.
    """

    def __init__(self, folder: Path, file_bytes: int = FILE_BYTES, folder_bytes: int = FOLDER_BYTES) -> None:
        self._folder = folder
        self._file_bytes = file_bytes
        self._folder_bytes = folder_bytes
        self._count = 0
        self._file: int | None = None
        self._written = 0

    @property
    def wants_new(self) -> bool:
        """Whether the next line needs a new file: none is open, or it is full. The last line may reach over the bound."""
        return self._file is None or self._written >= self._file_bytes

    def begin(self, header: bytes) -> None:
        """Go on in a new file that starts with `header`; raises OSError."""
        self.close()
        self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._prune()
        self._count += 1
        name = f"intentkv-{time.strftime('%Y%m%dT%H%M%S', time.gmtime())}-{os.getpid()}-{self._count}.jsonl"
        # O_EXCL: never somebody else's file, nor one behind a link.
        self._file = os.open(self._folder / name, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        self._written = 0
        self.write(header)

    def write(self, data: bytes) -> None:
        """Append `data`; raises OSError, after which a part of it may be in the file: close it and begin another."""
        assert self._file is not None, "begin() comes first"
        left = memoryview(data)
        while left:
            left = left[os.write(self._file, left) :]
        self._written += len(data)

    def close(self) -> None:
        """Close what is open; raises OSError where the system reports a late write error."""
        file, self._file = self._file, None
        if file is not None:
            os.close(file)

    def _prune(self) -> None:
        """Remove the trace files written longest ago, until a full new one fits into the folder's bound."""
        files = []
        for path in self._folder.iterdir():
            with contextlib.suppress(FileNotFoundError):  # another replica prunes the same folder
                status = path.lstat()
                if _NAME.fullmatch(path.name) and stat.S_ISREG(status.st_mode):
                    files.append((status.st_mtime, path, status.st_size))
        total = sum(size for _, _, size in files) + self._file_bytes
        for _, path, size in sorted(files):
            if total <= self._folder_bytes:
                return
            path.unlink(missing_ok=True)
            total -= size
