"""Whatever a user, a client or a file says: an answer, or our own error with a message; never another exception."""

from __future__ import annotations

import argparse
import json
import struct
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from intentkv.config import Settings, add_flags, parse_request, settings_from_flags, settings_from_kwargs
from intentkv.errors import SettingsError
from intentkv.report.read import ReportError, read_trace
from intentkv.report.render import render
from intentkv.report.text import Numbers
from intentkv.report.view import build_page
from intentkv.score.head.io import load_head
from intentkv.train.dataset import INDEX, FeatureSet
from intentkv.train.labels import argument_values
from intentkv.train.traces import TraceError, read_traces
from tests.report.traces import Teller
from tests.unit.heads import untrained_head

LONGEST = 4000  # characters of a message; one that repeats what came would fill a log
FIELDS = [name for name in Settings.__dataclass_fields__]
REQUEST_KEYS = [f"intentkv_{name}" for name in ("session", "budget", "scorer", "enabled", "span")]

anything = st.characters() | st.characters(categories=["Cs", "Cc"])  # half surrogate pairs and control characters too
texts = st.text(anything, max_size=40)
scalars = st.none() | st.booleans() | st.integers() | st.floats() | texts
values = st.recursive(scalars, lambda inner: st.lists(inner, max_size=4) | st.dictionaries(texts, inner, max_size=4))
numbers_and_units = st.from_regex(r"[-+]?[0-9]{0,25}[.eE]?[0-9]{0,5}[%:]?[0-9]{0,25}", fullmatch=True)


def nested(depth: int) -> Any:
    value: Any = []
    for _ in range(depth):
        value = [value]
    return value


LONG, HUGE = "a" * 1_000_000, 16**5000
odd = values | numbers_and_units | st.sampled_from([LONG, HUGE, float("nan"), b"bytes", "\x00", "\ud800"])


def refused(error: type[Exception], call: Callable[..., object], *args: object, **kwargs: object) -> str | None:
    """The message of the one error allowed, or None where the call went well."""
    try:
        call(*args, **kwargs)
    except error as caught:
        message = str(caught)
        assert message.strip() and len(message) <= LONGEST
        assert message.encode(), "a message with half a surrogate pair could not be sent"
        return message
    return None


class TestSettings:
    @given(st.dictionaries(st.sampled_from(FIELDS) | texts.filter(lambda name: name != "config"), odd, max_size=4))
    @example({"budget": LONG, "scorer": LONG, "trigger": HUGE, "trace": "\x00", "head": LONG})
    def test_keyword_arguments(self, given: dict[str, object]) -> None:
        refused(SettingsError, settings_from_kwargs, **given)

    @given(odd)
    def test_handed_down_settings(self, given: object) -> None:
        refused(SettingsError, Settings.from_dict, given)

    @given(st.lists(st.tuples(st.sampled_from([*FIELDS, "config"]), texts | numbers_and_units), max_size=4))
    @example([("action_template", LONG), ("scorer", LONG), ("config", LONG)])
    def test_flags(self, given: list[tuple[str, str]]) -> None:
        parser = argparse.ArgumentParser()
        add_flags(parser)
        flags = [f"--intentkv-{name.replace('_', '-')}={value}" for name, value in given]
        refused(SettingsError, settings_from_flags, parser.parse_args(["--enable-intentkv", *flags]))

    @given(st.binary(max_size=60) | texts.map(lambda text: text.encode(errors="surrogatepass")))
    @example(b"budget = " + b"[" * 5000)
    @example(b"trigger = 0x" + b"f" * 5000)
    @example(b"a" * 1_000_000 + b" = 1")
    @example(b'"\\u0000\\u001b[31m" = 1')
    def test_files(self, data: bytes) -> None:
        with tempfile.NamedTemporaryFile(suffix=".toml") as file:
            file.write(data)
            file.flush()
            refused(SettingsError, settings_from_kwargs, config=file.name)


class TestRequests:
    @given(st.dictionaries(st.sampled_from(REQUEST_KEYS) | texts, odd, max_size=4) | odd, odd)
    @example({"intentkv_budget": LONG, "intentkv_scorer": LONG, "intentkv_span": HUGE, "intentkv_session": LONG}, LONG)
    @example({f"intentkv_{LONG}": 1}, None)
    @example({"intentkv_\ud800\x1b[31m": 1}, "\ud800")
    def test_parameters(self, params: object, session: object) -> None:
        refused(SettingsError, parse_request, params, session, Settings())

    def test_values_nested_without_end(self) -> None:
        params = dict.fromkeys(REQUEST_KEYS, nested(5000))
        said = refused(SettingsError, parse_request, params, nested(5000), Settings())
        assert said and len(said.splitlines()) == 6
        assert refused(SettingsError, settings_from_kwargs, **dict.fromkeys(FIELDS, nested(5000)))


def safetensors(header: object, payload: bytes = b"") -> bytes:
    text = json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + payload


class TestHeads:
    @pytest.fixture(scope="class")
    def good(self, tmp_path_factory: pytest.TempPathFactory) -> bytes:
        return Path(untrained_head(tmp_path_factory.mktemp("head"), 8)).read_bytes()

    def load(self, data: bytes) -> str | None:
        with tempfile.NamedTemporaryFile(suffix=".safetensors") as file:
            file.write(data)
            file.flush()
            return refused(SettingsError, load_head, Path(file.name))

    @given(st.binary(max_size=64))
    def test_arbitrary_bytes(self, data: bytes) -> None:
        assert self.load(data)

    @given(st.integers(0), st.integers(0, 255))
    def test_one_damaged_byte(self, good: bytes, place: int, value: int) -> None:
        """In the header; a damaged weight is a number like any other."""
        end = 8 + struct.unpack("<Q", good[:8])[0]
        self.load(good[: place % end] + bytes([value]) + good[place % end + 1 :])

    @given(st.integers(0))
    def test_cut_short(self, good: bytes, length: int) -> None:
        assert self.load(good[: length % len(good)])

    @given(
        st.sampled_from(["head_dim", "layers", "heads", "seed", "metrics", "version", "model_id", "format"]),
        texts | numbers_and_units | st.sampled_from(["0", "9" * 5000, "999999999999", "[" * 5000, '{"x": NaN}', "٣"]),
    )
    @example("head_dim", "999999999999")
    @example("seed", "9" * 5000)
    @example("metrics", "[" * 100_000)
    @example("version", "x" * 1_000_000)
    def test_other_metadata(self, good: bytes, name: str, value: str) -> None:
        length = struct.unpack("<Q", good[:8])[0]
        header = json.loads(good[8 : 8 + length])
        header["__metadata__"][name] = value
        self.load(safetensors(header, good[8 + length :]))

    @given(
        st.sampled_from(["F32", "F64", "BF16", "F8_E4M3", "F8_E5M2", "U64", "I4", "C64", "BOOL"]),
        st.lists(st.integers(0, 10**12), max_size=4),
    )
    @example("F32", [0, 10**12])
    def test_other_tensors(self, dtype: str, shape: list[int]) -> None:
        tensor = {"dtype": dtype, "shape": shape, "data_offsets": [0, 8]}
        for size in (0, 8):
            tensor["data_offsets"] = [0, size]
            assert self.load(safetensors({"key.weight": tensor}, bytes(size)))


class TestTraces:
    """Of `--intentkv-trace`: lines that do not fit are left out, whatever they say, and the page is built all the same."""

    @pytest.fixture(scope="class")
    def good(self, tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
        teller = Teller(tmp_path_factory.mktemp("trace"))
        teller.turn(
            "agent", list(range(20)), [30, 31], query=(11, 13), drop=[4, 5], confidence=[0.5, 1], actions=((4, 5),)
        )
        return [json.loads(line) for line in teller.close().read_text().splitlines()]

    def report(self, lines: list[bytes]) -> None:
        with tempfile.NamedTemporaryFile(suffix=".jsonl") as file:
            file.write(b"\n".join(lines))
            file.flush()
            refused(ReportError, lambda: render(build_page(read_trace(Path(file.name)), Numbers(), None)))

    @given(st.lists(st.binary(max_size=60), max_size=4))
    def test_arbitrary_bytes(self, good: list[dict[str, Any]], lines: list[bytes]) -> None:
        self.report([*(json.dumps(line).encode() for line in good), *lines])

    @settings(max_examples=200, suppress_health_check=[HealthCheck.too_slow])
    @given(st.data())
    def test_one_field_says_anything(self, good: list[dict[str, Any]], data: st.DataObject) -> None:
        lines = json.loads(json.dumps(good))
        line = data.draw(st.sampled_from(lines))
        table = data.draw(st.sampled_from([line, *(value for value in line.values() if isinstance(value, dict))]))
        table[data.draw(st.sampled_from(sorted(table)) | texts)] = data.draw(
            values | st.sampled_from([10**400, -1, 2**31])
        )
        self.report([json.dumps(line).encode() for line in lines])

    @pytest.mark.parametrize("value", ["1" + "0" * 400, "[" * 400 + "]" * 400, "[" * 950 + "]" * 950, "1e999", "-0.0"])
    def test_numbers_and_nests_out_of_bounds(self, good: list[dict[str, Any]], value: str) -> None:
        for line in good:
            for name in line:
                odd = json.dumps({**line, name: "HERE"}).replace('"HERE"', value).encode()
                self.report([*(odd if other is line else json.dumps(other).encode() for other in good)])


class TestDataSets:
    """Chat traces for training, and the index of the feature shards made from them."""

    def read(self, data: bytes) -> str | None:
        with tempfile.NamedTemporaryFile(suffix=".jsonl") as file:
            file.write(data)
            file.flush()
            return refused(TraceError, lambda: list(read_traces(Path(file.name))))

    @given(st.binary(max_size=60))
    @example(b'{"messages": []}\n\xff\xfe')
    @example(b"[" * 100_000)
    def test_arbitrary_bytes(self, data: bytes) -> None:
        self.read(data)

    @given(st.sampled_from(["messages", "conversations"]), st.data())
    def test_messages_say_anything(self, form: str, data: st.DataObject) -> None:
        who, what = ("role", "content") if form == "messages" else ("from", "value")
        good = st.sampled_from(["user", "assistant", "tool"])
        call = st.fixed_dictionaries(
            {"function": st.fixed_dictionaries({"name": texts | values}, optional={"arguments": values})}
        )
        message = st.fixed_dictionaries(
            {who: good | values, what: texts | values},
            optional={"tool_calls": st.lists(call | values, max_size=2) | values},
        )
        messages = data.draw(st.lists(message | values, max_size=3))
        self.read(json.dumps({form: messages}).encode())

    @pytest.mark.parametrize(
        "message",
        [
            {"role": ["user"], "content": "a"},
            {"role": "user", "content": [{"type": "text", "text": 3}]},
            {"role": "user", "content": "\ud800"},
            {"role": "assistant", "content": "", "tool_calls": 3},
        ],
    )
    def test_a_message_that_is_none_is_named(self, message: dict[str, object]) -> None:
        said = self.read(b'{"messages": []}\n' + json.dumps({"messages": [message]}).encode())
        assert said and ", line 2: " in said

    def test_arguments_nested_too_deeply_count_as_a_text(self) -> None:
        line = {
            "messages": [{"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "[" * 9000}}]}]
        }
        with tempfile.NamedTemporaryFile(suffix=".jsonl") as file:
            Path(file.name).write_text(json.dumps(line))
            ((message,),) = read_traces(Path(file.name))
        assert argument_values(message.calls[0]) == ["[" * 9000]

    @given(values | st.fixed_dictionaries(
        {"format": st.just("intentkv-features"), "version": st.just(1), "model": values, "data_hash": values},
        optional={"shards": st.lists(st.dictionaries(st.sampled_from(["file", "sha256", "memory_errors"]), values)) | values},
    ))  # fmt: skip
    def test_an_index_that_is_none(self, index: object) -> None:
        with tempfile.TemporaryDirectory() as folder:
            for text in (json.dumps(index), "[" * 100_000):
                (Path(folder) / INDEX).write_text(text)
                assert refused(ValueError, FeatureSet, Path(folder))
