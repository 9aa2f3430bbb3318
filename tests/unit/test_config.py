"""Settings: every bad value is refused by name, all at once, and good ones survive every way in and out."""

import argparse
import json
import pickle
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from intentkv.config import (
    Budget,
    Settings,
    add_flags,
    settings_from_flags,
    settings_from_kwargs,
)
from intentkv.errors import SettingsError
from intentkv.score.registry import HEAD_SCORER, SCORERS


def from_flags(*args: str) -> Settings | None:
    parser = argparse.ArgumentParser()
    add_flags(parser)
    return settings_from_flags(parser.parse_args(args))


def refusal(call: object, *args: object, **kwargs: object) -> tuple[str, ...]:
    with pytest.raises(SettingsError) as caught:
        call(*args, **kwargs)  # type: ignore[operator]
    assert str(caught.value) == "\n".join(caught.value.reasons)
    return caught.value.reasons


def test_importing_the_settings_loads_neither_torch_nor_sglang() -> None:
    code = "import sys, intentkv.config; print([m for m in ('torch', 'numpy', 'sglang') if m in sys.modules])"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "[]"


def test_off_is_none_and_on_is_the_documented_defaults() -> None:
    assert from_flags() is None
    assert from_flags("--enable-intentkv") == Settings(
        scorer="intent",
        budget=Budget("fixed", 8192),
        trigger=512,
        layout="reclaim",
        memory_decay=0.5,
        max_sessions=1024,
        recent=64,
    )


def test_every_flag_is_read() -> None:
    settings = from_flags(
        *("--enable-intentkv", "--intentkv-scorer", "streaming", "--intentkv-budget", "12.5%"),
        *("--intentkv-trigger", "1", "--intentkv-layout", "mask", "--intentkv-memory-decay", "0"),
        *("--intentkv-max-sessions", "7", "--intentkv-recent", "0"),
    )
    assert settings == Settings("streaming", Budget("share", 12.5), 1, "mask", 0.0, 7, 0)


def test_a_trace_folder_is_made_absolute_and_must_be_possible(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    settings = from_flags("--enable-intentkv", "--intentkv-trace", "new/traces")
    assert settings is not None and settings.trace == str(tmp_path / "new" / "traces")
    assert Settings.from_dict(json.loads(json.dumps(settings.to_dict()))) == settings
    assert not (tmp_path / "new").exists()
    (tmp_path / "file").write_text("")
    for bad in ("file", "file/below", "", "a\0b"):
        (reason,) = refusal(from_flags, "--enable-intentkv", "--intentkv-trace", bad)
        assert reason.startswith("--intentkv-trace: expected a folder")


def test_help_names_every_scorer_and_default() -> None:
    parser = argparse.ArgumentParser()
    add_flags(parser)
    text = "".join(parser.format_help().split())  # argparse breaks lines at dashes too
    assert all(name in text for name in SCORERS)
    assert "orauto:bythemodel'sconfidence(default:8192)" in text


def test_a_flag_without_the_switch_is_refused() -> None:
    reasons = refusal(from_flags, "--intentkv-budget", "1", "--intentkv-config", "x.toml")
    assert [r.split()[0] for r in reasons] == ["--intentkv-budget", "--intentkv-config"]
    assert all("--enable-intentkv" in r for r in reasons)


def test_all_bad_flags_are_reported_at_once() -> None:
    reasons = refusal(
        from_flags,
        *("--enable-intentkv", "--intentkv-scorer", "intnet", "--intentkv-budget", "0", "--intentkv-trigger", "many"),
        *("--intentkv-layout", "masks", "--intentkv-memory-decay", "nan", "--intentkv-max-sessions", "-1"),
        *("--intentkv-recent", "1.5"),
    )
    tokens = "a number of tokens from 1 to 2147483647, a share of the history above 0% and up to 100%, or auto"
    scorers = f"one of {', '.join(SCORERS)}"
    assert reasons == (
        f"--intentkv-scorer: expected {scorers}, got 'intnet'; the nearest is 'intent'",
        f"--intentkv-budget: expected {tokens}, got '0'",
        "--intentkv-trigger: expected an integer from 1 to 2147483647, got 'many'",
        "--intentkv-layout: expected one of reclaim, mask, got 'masks'; the nearest is 'mask'",
        "--intentkv-memory-decay: expected a number from 0 to 100, got 'nan'",
        "--intentkv-max-sessions: expected an integer from 1 to 2147483647, got '-1'",
        "--intentkv-recent: expected an integer from 0 to 2147483647, got '1.5'",
    )


def test_the_file_speaks_and_flags_beat_it(tmp_path: Path) -> None:
    file = tmp_path / "intentkv.toml"
    file.write_text('budget = "25%"\ntrigger = 64\nmemory-decay = 1\nmax_sessions = "9"\n')
    settings = from_flags("--enable-intentkv", "--intentkv-config", str(file), "--intentkv-trigger", "128")
    assert settings == Settings(budget=Budget("share", 25.0), trigger=128, memory_decay=1.0, max_sessions=9)
    assert settings_from_kwargs(config=str(file), trigger=128) == settings


def test_the_file_is_refused_with_every_reason_beside_the_flags(tmp_path: Path) -> None:
    file = tmp_path / "intentkv.toml"
    file.write_text("bugdet = 5\ntrigger = true\nmax-sessions = 1\nmax_sessions = 2\n[recent]\nx = 1\n")
    reasons = refusal(from_flags, "--enable-intentkv", "--intentkv-config", str(file), "--intentkv-layout", "x")
    assert reasons[0] == f"{file}: max_sessions is given twice"
    assert reasons[1] == f"{file}: bugdet: unknown key; the nearest is budget"
    assert reasons[2].startswith(f"{file}: trigger: expected an integer")
    assert reasons[3].startswith(f"{file}: recent: expected an integer")
    assert reasons[4].startswith("--intentkv-layout: expected one of")
    assert len(reasons) == 5


@pytest.mark.parametrize("content", [None, b"budget = ", b"\xff\xfe"], ids=["missing", "bad toml", "bad utf-8"])
def test_an_unreadable_file_is_one_reason(tmp_path: Path, content: bytes | None) -> None:
    file = tmp_path / "intentkv.toml"
    if content is not None:
        file.write_bytes(content)
    reasons = refusal(from_flags, "--enable-intentkv", "--intentkv-config", str(file), "--intentkv-recent", "x")
    assert reasons[0].startswith(f"--intentkv-config: cannot read {str(file)!r}: ")
    assert reasons[1].startswith("--intentkv-recent: ")


def test_keyword_arguments_are_checked_like_flags() -> None:
    assert settings_from_kwargs(scorer="random", budget="25%") == Settings("random", Budget("share", 25.0))
    reasons = refusal(settings_from_kwargs, budget=True, layuot="mask", recent=-1)
    assert [r.split(":")[0] for r in reasons] == ["budget", "layuot", "recent"]
    assert reasons[1].endswith("the nearest is layout")


def test_actkv_settings() -> None:
    settings = from_flags(
        *("--enable-intentkv", "--intentkv-budget", "auto", "--intentkv-budget-init", "64"),
        *("--intentkv-budget-max", "4096", "--intentkv-budget-growth", "2", "--intentkv-lrfu-decay", "0.25"),
        *("--intentkv-top-p", "0.8", "--intentkv-action-template", "<action>...</action>"),
    )
    expected = {"budget_init": 64, "budget_max": 4096, "budget_growth": 2.0, "lrfu_decay": 0.25, "top_p": 0.8}
    assert settings == Settings(budget=Budget("auto", 0), action_template="<action>...</action>", **expected)
    defaults = Settings()
    assert (defaults.budget_init, defaults.budget_max, defaults.budget_growth) == (512, 30000, 1.75)
    assert (defaults.lrfu_decay, defaults.top_p, defaults.action_template) == (0.5, 0.9, "auto")


def test_bad_actkv_settings_are_refused() -> None:
    reasons = refusal(
        settings_from_kwargs,
        budget_init=0,
        budget_growth=1,
        lrfu_decay=2,
        top_p=0,
        action_template="hermess",
    )
    assert [r.split(":")[0] for r in reasons] == [
        "budget_init",
        "budget_growth",
        "lrfu_decay",
        "top_p",
        "action_template",
    ]
    assert "OPEN...CLOSE" in reasons[-1]
    (reason,) = refusal(settings_from_kwargs, budget_max=100)
    assert reason == "budget_init: expected at most budget_max, got 512 and 100: lower it, or raise budget_max"


@pytest.mark.parametrize("raw", [0, -1, 1.5, True, None, "", "%", "0%", "101%", "nan%", "-5%", "1e9", 2**31, "٣%%"])
def test_bad_budgets_are_refused(raw: object) -> None:
    with pytest.raises(ValueError, match="expected a number of tokens from 1 to 2147483647, a share"):
        Budget.parse(raw)


@given(
    st.one_of(st.integers(1, 2**31 - 1), st.floats(0, 100, exclude_min=True).map(lambda x: f"{x}%"), st.just("auto"))
)
def test_a_budget_reads_back_what_it_prints(raw: object) -> None:
    budget = Budget.parse(raw)
    assert Budget.parse(str(budget)) == budget
    assert Budget.parse(budget) == budget


@given(st.floats(0, 100, exclude_min=True), st.integers(0, 10**6))
def test_a_share_is_at_most_that_share(percent: float, history: int) -> None:
    tokens = Budget.parse(f"{percent}%").tokens(history)
    assert 0 <= tokens <= history
    assert tokens <= history * percent / 100 < tokens + 1


def test_budget_tokens() -> None:
    assert Budget.parse("100").tokens(10) == 100
    assert Budget.parse("25%").tokens(1003) == 250
    assert Budget.parse("29%").tokens(100) == 29
    assert (str(Budget.parse("25.0%")), str(Budget.parse("12.5%")), str(Budget.parse(64))) == ("25%", "12.5%", "64")


@given(
    st.builds(
        Settings,
        scorer=st.sampled_from(sorted(SCORERS.keys() - {HEAD_SCORER})),
        budget=st.one_of(
            st.builds(Budget, st.just("fixed"), st.integers(1, 2**31 - 1)),
            st.builds(Budget, st.just("share"), st.floats(0, 100, exclude_min=True)),
            st.just(Budget("auto", 0)),
        ),
        trigger=st.integers(1, 2**31 - 1),
        layout=st.sampled_from(["reclaim", "mask"]),
        memory_decay=st.floats(0, 100),
        max_sessions=st.integers(1, 2**31 - 1),
        recent=st.integers(0, 2**31 - 1),
        budget_init=st.integers(1, 100),
        budget_max=st.integers(100, 2**31 - 1),
        budget_growth=st.floats(1.01, 100),
        lrfu_decay=st.floats(0, 1),
        top_p=st.floats(0.01, 1),
        action_template=st.sampled_from(["auto", "hermes", "harmony", "llama", "answer", "<a>...</a>"]),
    )
)
def test_settings_survive_json_and_pickle(settings: Settings) -> None:
    plain = settings.to_dict()
    assert {type(value) for value in plain.values()} <= {str, int, float}
    assert Settings.from_dict(json.loads(json.dumps(plain))) == settings
    assert pickle.loads(pickle.dumps(settings)) == settings


def test_the_error_survives_pickle_with_its_reasons() -> None:
    error = pickle.loads(pickle.dumps(SettingsError(["one", "two"])))
    assert error.reasons == ("one", "two")
    assert str(error) == "one\ntwo"
