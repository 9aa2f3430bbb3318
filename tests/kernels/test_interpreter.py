"""The Triton kernels, run by Triton's interpreter on the CPU: the tests of the torch path over again.

Triton decides when a kernel is defined, so it takes a process of its own.
"""

import os
import re
import subprocess
import sys
from pathlib import Path

FOLDER = Path(__file__).parent
FILES = ("test_recover.py", "test_compact.py", "test_rule_score.py")


def test_kernels_in_the_interpreter() -> None:
    run = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *(str(FOLDER / name) for name in FILES)],
        env={**os.environ, "TRITON_INTERPRET": "1"},
        capture_output=True,
        text=True,
        cwd=FOLDER.parent.parent,
        timeout=900,
        check=False,
    )
    assert run.returncode == 0, run.stdout[-6000:] + run.stderr[-2000:]
    passed = re.search(r"(\d+) passed", run.stdout)
    assert passed and int(passed[1]) >= 50, run.stdout[-2000:]
    assert "skipped" not in run.stdout
