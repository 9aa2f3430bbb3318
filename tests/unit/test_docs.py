"""The documentation against the code: links, flags, request fields, metrics, commands."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import pytest

from intentkv.config import _FIELDS, _REQUEST_CHECKS, settings_from_kwargs
from intentkv.score.registry import SCORERS
from tests.unit.test_metrics_dashboard import CONTRACT

ROOT = Path(__file__).resolve().parents[2]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "CHANGELOG.md", *sorted((ROOT / "docs").glob("*.md"))]


def text(name: str) -> str:
    return (ROOT / "docs" / name).read_text(encoding="utf-8")


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page: Path) -> None:
    links = re.findall(r"\]\((?!https?://)([^)#\s]+)", page.read_text(encoding="utf-8"))
    assert [link for link in links if not (page.parent / link).exists()] == []


def test_every_page_is_in_the_index() -> None:
    linked = set(re.findall(r"\]\((\w[\w-]*\.md)\)", text("index.md")))
    assert {page.name for page in (ROOT / "docs").glob("*.md")} - {"index.md"} <= linked


def test_every_flag_and_request_field_is_explained() -> None:
    page = text("configuration.md")
    assert [name for name in _FIELDS if f"| `--intentkv-{name.replace('_', '-')}` |" not in page] == []
    assert [name for name in _REQUEST_CHECKS if f"`intentkv_{name}`" not in page] == []


def test_the_file_in_the_docs_is_a_valid_one() -> None:
    (example,) = re.findall(r"```toml\n(.*?)```", text("configuration.md"), re.DOTALL)
    settings_from_kwargs(**tomllib.loads(example))


def test_every_metric_is_explained() -> None:
    families = {re.sub(r"_(bucket|sum|count|created)$", "", name) for name in CONTRACT}
    assert [name for name in families if name not in text("operations.md")] == []


def test_every_scorer_is_explained() -> None:
    pages = "".join(text(name) for name in ("scoring.md", "baselines.md", "actkv.md", "residual-head.md"))
    assert [name for name in SCORERS if f"`{name}`" not in pages] == []


def test_scripts_and_targets_that_are_named_exist() -> None:
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    for page in PAGES:
        written = page.read_text(encoding="utf-8")
        for script in re.findall(r"scripts/\w+\.py", written):
            assert (ROOT / script).exists(), f"{page.name} names {script}"
        for target in re.findall(r"`make ([a-z][a-z-]*)", written):
            assert re.search(rf"^{target}:", makefile, re.MULTILINE), f"{page.name} names make {target}"


def test_every_test_in_the_scenarios_exists() -> None:
    named = re.findall(r"`(tests/[\w/]+\.py)::(\w+)`", text("scenarios.md"))
    assert len(named) > 30
    for file, name in named:
        assert re.search(rf"def {name}\(", (ROOT / file).read_text(encoding="utf-8")), f"{file} has no {name}"
