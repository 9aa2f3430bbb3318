"""A file of what has been played, one session a line, so that a killed run goes on where it was."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

Play = dict[str, Any]  # configuration, session, turns: one dictionary a turn


class Journal:
    """The plays of one plan, in the order they were finished.

    The first line is the plan; each further one a play. A line is there whole or not at all: what a killed run left
    unfinished at the end is cut off, and that session is played again from its start.
    """

    def __init__(self, path: Path, plan: dict[str, Any]) -> None:
        """Opens or begins the journal at `path`.

        Raises:
            ValueError: the file holds another plan.
        """
        self._path = path
        self.plays: list[Play] = []
        whole = _whole_lines(path)
        if not whole:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(json.dumps(plan) + "\n")
            return
        if json.loads(whole[0]) != json.loads(json.dumps(plan)):
            raise ValueError(
                f"{path} holds another evaluation: {whole[0].strip()}; this one is {json.dumps(plan)}. "
                "Give the arguments it was begun with, or another --out"
            )
        self.plays = [json.loads(line) for line in whole[1:]]
        os.truncate(path, sum(len(line.encode()) for line in whole))

    def has(self, configuration: str, session: str) -> bool:
        return any(play["configuration"] == configuration and play["session"] == session for play in self.plays)

    def add(self, play: Play) -> None:
        """Appends a finished play; it is on the disk when this returns."""
        with open(self._path, "a") as file:
            file.write(json.dumps(play) + "\n")
            file.flush()
            os.fsync(file.fileno())
        self.plays.append(play)


def _whole_lines(path: Path) -> list[str]:
    if not path.exists():
        return []
    return [line for line in path.read_text().splitlines(keepends=True) if line.endswith("\n")]
