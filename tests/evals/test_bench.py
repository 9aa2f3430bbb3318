"""`make bench` goes on with an evaluation that was killed, and begins one that was finished anew."""

import json
import os
from pathlib import Path

import pytest

from intentkv.evals.provenance import commit
from scripts.bench import is_over


@pytest.mark.parametrize(
    ("plan", "finished", "over"),
    [
        (json.dumps({"commit": commit()}) + "\n", False, False),
        (json.dumps({"commit": commit()}) + "\n", True, True),
        (json.dumps({"commit": "0" * 12}) + "\n", False, True),
        ('{"commi', False, False),  # killed while it wrote the plan: the journal begins anew by itself
        (None, True, False),
    ],
    ids=["killed", "finished", "another commit", "no plan yet", "none"],
)
def test_which_journals_are_over(tmp_path: Path, plan: str | None, finished: bool, over: bool) -> None:
    out, journal = tmp_path / "agents.json", tmp_path / "agents.journal"
    out.write_text("{}")
    if plan is not None:
        journal.write_text(plan)
        os.utime(journal, ns=(10, 10))
    os.utime(out, ns=(20, 20) if finished else (5, 5))
    assert is_over(out) is over
