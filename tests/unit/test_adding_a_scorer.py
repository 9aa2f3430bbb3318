"""docs/adding-a-scorer.md, followed to the letter in a copy of the repository."""

import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import get_args

import pytest

from intentkv.score.base import Need

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "adding-a-scorer.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"^```python (\S+)\n(.*?)^```$", PAGE, flags=re.MULTILINE | re.DOTALL)


@pytest.fixture(scope="module")
def copy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The repository after steps 1, 3 and 4."""
    root = tmp_path_factory.mktemp("copy")
    for name in ("intentkv", "tests/unit"):
        shutil.copytree(ROOT / name, root / name, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / "pyproject.toml", root)
    for name, code in BLOCKS:
        path = root / name
        if not path.exists():  # steps 1 and 4: a new file
            path.write_text(code, encoding="utf-8")
            continue
        table = path.read_text(encoding="utf-8")
        head, start, body = table.partition("SCORERS: dict")
        assert start, f"{name} has no table of scorers"
        if code.startswith("def "):  # step 3: above the table
            path.write_text(f"{head}{code}\n\n{start}{body}", encoding="utf-8")
        else:  # step 3: at the end of the table
            entries, end, rest = body.partition("\n}\n")
            path.write_text(f"{head}{start}{entries}\n{code.rstrip()}{end}{rest}", encoding="utf-8")
    return root


def run(root: Path, *command: str) -> str:
    """A command in the copy, by this environment's python; its output. Fails the test if the command fails."""
    done = subprocess.run([sys.executable, *command], check=False, cwd=root, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_the_page_has_five_steps_and_four_pieces_of_code() -> None:
    assert re.findall(r"^## (\d)\. ", PAGE, flags=re.MULTILINE) == ["1", "2", "3", "4", "5"]
    assert [name for name, _ in BLOCKS] == [
        "intentkv/score/key_norm.py",
        "intentkv/score/registry.py",
        "intentkv/score/registry.py",
        "tests/unit/test_key_norm.py",
    ]


def test_the_tests_of_the_last_step_pass(copy: Path) -> None:
    """Its own, and those that run for every registered scorer, which must have seen the new one."""
    (line,) = re.findall(r"^\.venv/bin/python (-m pytest .*)$", PAGE, flags=re.MULTILINE)
    output = run(copy, *line.split(), "-v", "-p", "no:cacheprovider")
    assert "tests/unit/test_key_norm.py::test_equals_the_loop PASSED" in output
    assert len(re.findall(r"test_every_scorer_returns_one_number_a_candidate\[\d+-key-norm\] PASSED", output)) == 3
    assert "test_a_scorer_says_what_it_was_not_given[key-norm] PASSED" in output


def test_the_code_is_written_as_the_linter_wants_it(copy: Path) -> None:
    names = sorted({name for name, _ in BLOCKS})
    run(copy, "-m", "ruff", "check", "--no-cache", *names)
    run(copy, "-m", "ruff", "format", "--check", "--no-cache", *names)


def test_flags_and_messages_know_the_name(copy: Path) -> None:
    """And it is the copy that knows it."""
    code = """
import argparse
import intentkv.config as config
parser = argparse.ArgumentParser()
config.add_flags(parser)
print(config.__file__)
print(parser.format_help())
print(config.settings_from_flags(parser.parse_args(["--enable-intentkv", "--intentkv-scorer", "key-norm"])))
"""
    output = run(copy, "-c", code)
    assert output.startswith(str(copy))
    described = re.sub(r"\s", "", output.partition("how history tokens are ranked:")[2].partition("(default")[0])
    assert described.split(",")[-1] == "key-norm"  # argparse breaks lines at dashes
    assert "scorer='key-norm'" in output


def test_the_table_of_needs_is_complete() -> None:
    rows = re.findall(r"^\| `(\w+)` \| `(\w+)` \|", PAGE, flags=re.MULTILINE)
    assert {need for need, _ in rows} == set(get_args(Need))
