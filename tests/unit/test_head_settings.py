"""`--intentkv-head`: given alone it is used, and the scorer that reads it is refused without it."""

import argparse
import json
from pathlib import Path

import pytest

from intentkv.config import Settings, add_flags, parse_request, settings_from_flags, settings_from_kwargs
from intentkv.errors import SettingsError
from intentkv.score.registry import make_scorer


@pytest.fixture
def file(tmp_path: Path) -> str:
    path = tmp_path / "head.safetensors"
    path.write_bytes(b"looked at when the model is known")
    return str(path)


def from_flags(*args: str) -> Settings | None:
    parser = argparse.ArgumentParser()
    add_flags(parser)
    return settings_from_flags(parser.parse_args(["--enable-intentkv", *args]))


def test_a_head_alone_is_used_and_a_named_scorer_beats_it(file: str) -> None:
    assert from_flags("--intentkv-head", file) == Settings(scorer="intent-head", head=file)
    assert from_flags("--intentkv-head", file, "--intentkv-scorer", "intent") == Settings(scorer="intent", head=file)
    assert Settings().head is None
    assert Settings().scorer == "intent"


def test_the_path_is_absolute_whatever_folder_the_server_starts_in(file: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(Path(file).parent)
    assert settings_from_kwargs(head="head.safetensors").head == file


def test_a_head_survives_json(file: str) -> None:
    settings = Settings(scorer="intent-head", head=file)
    assert Settings.from_dict(json.loads(json.dumps(settings.to_dict()))) == settings


def test_a_missing_file_is_one_reason(tmp_path: Path) -> None:
    missing = str(tmp_path / "none.safetensors")
    with pytest.raises(SettingsError) as caught:
        from_flags("--intentkv-head", missing, "--intentkv-scorer", "intent-head", "--intentkv-trigger", "0")
    of_head, of_trigger = sorted(caught.value.reasons)
    assert of_head.startswith("--intentkv-head: expected the path of a file, got ")
    assert of_trigger.startswith("--intentkv-trigger: ")


def test_the_head_scorer_without_a_head_is_refused(file: str) -> None:
    with pytest.raises(SettingsError, match="scorer intent-head reads a residual head: set --intentkv-head"):
        from_flags("--intentkv-scorer", "intent-head")
    with pytest.raises(SettingsError, match="intent-head needs a server that was started with --intentkv-head"):
        parse_request({"intentkv_scorer": "intent-head"}, None, Settings())
    served = parse_request({"intentkv_scorer": "intent-head"}, None, Settings(head=file))
    assert served.scorer == "intent-head"
    with pytest.raises(ValueError, match="expected a head, got none"):
        make_scorer("intent-head", Settings())


def test_the_published_rule_stays_without_a_head(file: str) -> None:
    scorer = make_scorer("intent-rule", Settings(scorer="intent-head", head=file))
    assert scorer.name == "intent-rule"
