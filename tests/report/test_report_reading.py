"""From a trace to what the page shows; and traces that somebody has damaged or made up."""

from __future__ import annotations

import json
import stat
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from intentkv import cli
from intentkv.evals.model import model_path
from intentkv.report.read import ReportError, read_trace
from intentkv.report.sessions import NO_SCORE, build_sessions
from intentkv.report.text import Numbers, TokenizerText, visible
from intentkv.report.view import build_page
from intentkv.report.wanted import wanted_positions
from tests.report.traces import Teller

FACT = [50, 51, 52, 53, 54]  # "the code is K X"


def two_turns(folder: Path) -> Path:
    """Turn 1 brings a fact at 4..9 and drops 4..7 of it; turn 2 asks for it."""
    teller = Teller(folder)
    first = [1, 2, 10, 11, *FACT, 12, 13, 20, 21]
    teller.turn("agent", first, [30, 31], query=(11, 13), drop=[4, 5, 6, 7])
    second = [*first, 30, 31, 40, *FACT[:4], 41]
    teller.turn("agent", second, [60], query=(15, 21), drop=[2], confidence=[0.5], actions=((15, 17),))
    return teller.close()


class TestSessions:
    def test_every_token_has_its_fate(self, tmp_path: Path) -> None:
        (session,) = build_sessions(read_trace(two_turns(tmp_path)))
        first, second = session.turns
        assert first.block.tokens.tolist() == [1, 2, 10, 11, *FACT, 12, 13, 20, 21, 30, 31]
        assert first.block.gone.tolist() == [0, 0, 2, 0, 1, 1, 1, 1, *[0] * 7]
        assert second.block.start == 15 and second.block.tokens.tolist() == [40, *FACT[:4], 41, 60]
        assert (first.live, second.live, second.finish.length) == (11, 17, 22)
        scored = first.block.score != NO_SCORE
        assert not scored[:2].any() and scored[2:11].all()
        (want,) = session.wants
        assert (want.turn, want.gone, want.shown_in, want.start, want.tokens.tolist()) == (2, 1, 1, 4, FACT[:4])

    def test_an_edited_history_leaves_its_old_text(self, tmp_path: Path) -> None:
        teller = Teller(tmp_path)
        teller.turn("a", [1, 2, 3, 4, 5], [6], query=(2, 5))
        teller.turn("a", [1, 2, 3, 9, 9, 9], [7], query=(3, 6), drop=[2])
        teller.turn("a", [1, 2, 3, 9, 8], [], query=(3, 5))
        first, second, third = build_sessions(read_trace(teller.close()))[0].turns
        assert first.block.left.tolist() == [0, 0, 0, 2, 2, 2] and first.block.gone.tolist() == [0, 0, 2, 0, 0, 0]
        assert second.block.left.tolist() == [0, 3, 3, 3] and third.block.tokens.tolist() == [8]

    def test_a_rotated_trace_joins_again(self, tmp_path: Path) -> None:
        file = two_turns(tmp_path / "a")
        head, *rest = file.read_text().splitlines(keepends=True)
        turn = json.loads(rest[-1])
        turn |= {"from": 0, "tokens": [1, 2, 10, 11, *FACT, 12, 13, 20, 21, 30, 31, *turn["tokens"]]}
        folder = tmp_path / "b"
        folder.mkdir()
        (folder / "1.jsonl").write_text(head + "".join(rest[:-1]))
        (folder / "2.jsonl").write_text(head + json.dumps(turn) + "\n")
        joined, whole = (build_sessions(read_trace(path))[0] for path in (folder, file))
        assert [t.block.tokens.tolist() for t in joined.turns] == [t.block.tokens.tolist() for t in whole.turns]


class TestWanted:
    def test_live_or_common_text_is_not_wanted_back(self) -> None:
        def wanted(history: list[int], dropped: list[int], asked: list[int], **more: Any) -> list[int]:
            tokens = np.array([*history, *asked], np.int32)
            holes = np.zeros(len(tokens), np.bool_)
            holes[dropped] = True
            found = wanted_positions(tokens, holes, (len(history), len(tokens)), len(tokens), **more)
            return np.flatnonzero(found).tolist()

        history = [1, 2, 3, 4, 5, 6, 7, 8]
        assert wanted(history, [3], [2, 3, 4, 5]) == [1, 2, 3, 4]
        assert wanted(history, [7], [2, 3, 4, 5]) == []  # it is live
        assert wanted([*history, 0, 2, 3, 4, 5], [3], [2, 3, 4, 5]) == []  # it is live elsewhere
        assert wanted(history * 5, list(range(40)), [2, 3, 4, 5]) == []  # phrasing
        assert wanted(history, [3], [2, 3, 4, 5], special=frozenset({4})) == []
        assert wanted([1, 2], [0], [1]) == [] and wanted([], [], []) == []


class TestText:
    def test_invisible_and_reordering_characters_are_spelt_out(self) -> None:
        text = visible("a\x00b\x1b[2J\u202etxt\u2066\u200b\ud800\ue000\u2028 x\tb\nc\x7f")
        assert text == "a␀b␛[2J⟨U+202E⟩txt⟨U+2066⟩⟨U+200B⟩⟨U+D800⟩⟨U+E000⟩⟨U+2028⟩ x\tb\nc⟨U+007F⟩"

    def test_a_tokenizer_gives_the_text_back_piece_by_piece(self) -> None:
        decoder = TokenizerText(str(model_path()))
        text = "Straße 12 — 日本語 🙂 done"
        ids = decoder._tokenizer.encode(text)
        pieces = decoder.pieces(ids)
        assert len(pieces) == len(ids) and "".join(pieces) == text and "" in pieces
        assert decoder.pieces([10**6, *ids[:1]]) == ["⟨1000000⟩", pieces[0]]
        assert decoder.pieces(ids[: pieces.index("") + 1])[-1] == "\ufffd"

    def test_an_unknown_tokenizer_is_a_clear_error(self) -> None:
        with pytest.raises(ReportError, match="cannot load 'no/such-model', which must be on this machine"):
            TokenizerText("no/such-model")


def finish_line(**changes: Any) -> dict[str, Any]:
    line: dict[str, Any] = {
        "kind": "finish", "time": 1.0, "rid": "r", "session": "s", "key": "k", "scorer": "intent", "budget": "1", "turn": 1,
        "prompt": 2, "answer": 1, "events": 0, "logical_tokens": 3, "live_tokens": 3, "dropped_tokens": 0, "freed_slots": 0,
        "reused_prefix_tokens": 0, "score_ms": 0.0, "reason": "stop", "seconds": 0.1, "spans": {"system": 0, "query": [0, 2]},
        "pool": {"free": 1, "evictable": 0}, "holes": "AA==", "from": 0, "tokens": [1, 2, 3],
    }  # fmt: skip
    return {**line, **changes}


class TestUntrusted:
    @pytest.mark.parametrize(
        ("line", "reason"),
        [
            ("not json", "it is not JSON"),
            ("[" * 200_000, "it is not JSON"),
            ("9" * 100_000, "it is not JSON"),
            (b"\xff\xfe\x00", "it is not JSON"),
            ('{"kind": "finish", "time": NaN}', "it is not JSON"),
            ("[1]", "it is not an object"),
            ('{"kind": "noise"}', "its kind is unknown"),
            ('{"kind": ["finish"]}', "its kind is unknown"),
            (finish_line(time=1e300), "'time' is not a number"),
            (finish_line(time=True), "'time' is not a number"),
            (finish_line(prompt=10**30), "'prompt' is not a count"),
            (finish_line(prompt=-1), "'prompt' is not a count"),
            (finish_line(session="s" * 300), "'session' is not a string of at most 256"),
            (finish_line(session=None), "'session' is not a string"),
            (finish_line(tokens=[1, 2]), "its tokens do not add up"),
            (finish_line(tokens=[1, True, 3]), "no token id"),
            (finish_line(tokens=[1, -2, 3]), "no token id"),
            (finish_line(tokens={"0": 1}), "not a list of token ids"),
            ({**finish_line(), "from": 2, "tokens": [3]}, "the line that it continues is missing"),
            (finish_line(holes="!!"), "'holes' is not base64"),
            (finish_line(holes="AAAA"), "'holes' does not have 1 bytes"),
            (finish_line(holes=5), "'holes' does not have 1 bytes"),
            (finish_line(spans={"system": 0, "query": [2, 9]}), "'query' is not a span"),
            (finish_line(spans=[]), "'spans' is not an object"),
            (finish_line(pool=None), "'pool' is not an object"),
            (finish_line(actions=[[0, 1], "x"]), "'actions' is not a span"),
            (finish_line(actions={}), "'actions' is not a list"),
            (finish_line(confidence=""), "'confidence' does not have 1 bytes"),
        ],
    )
    def test_a_bad_line_is_skipped_counted_and_shown(self, tmp_path: Path, line: Any, reason: str) -> None:
        data = line if isinstance(line, bytes) else (json.dumps(line) if isinstance(line, dict) else line).encode()
        file = tmp_path / "t.jsonl"
        file.write_bytes(json.dumps(finish_line(key="good")).encode() + b"\n\n" + data + b"\n")
        trace = read_trace(file)
        assert len(trace.finished) == 1 and trace.skipped.total() == 1
        ((said, lines),) = build_page(trace, Numbers()).skipped
        assert lines == 1 and said.startswith(reason) or reason in said

    def test_a_line_without_end_is_skipped_in_pieces(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("intentkv.report.read.MAX_LINE_BYTES", 2**20)
        file = tmp_path / "t.jsonl"
        good = json.dumps(finish_line()).encode() + b"\n"
        file.write_bytes(b'{"kind":"' + b"x" * (3 * 2**20) + b'"}\n' + good + b"y" * 2**20)
        trace = read_trace(file)
        assert len(trace.finished) == 1 and dict(trace.skipped) == {"it is longer than 1 MiB": 2}

    @pytest.mark.parametrize("content", [None, b"", b"\x00" * 50, b'{"kind":"start","version":1}\n'])
    def test_nothing_to_report_is_one_clear_error(
        self, tmp_path: Path, capsys: pytest.CaptureFixture[str], content: bytes | None
    ) -> None:
        file = tmp_path / "t.jsonl"
        if content is not None:
            file.write_bytes(content)
        output = tmp_path / "r.html"
        assert cli.main(["report", str(file), "-o", str(output)]) == 1
        said = capsys.readouterr().err
        assert said.startswith("intentkv report: ") and said.count("\n") == 1 and not output.exists()

    def test_a_newer_format_is_refused(self, tmp_path: Path) -> None:
        file = tmp_path / "t.jsonl"
        file.write_text('{"kind":"start","version":2}\n' + json.dumps(finish_line()) + "\n")
        with pytest.raises(ReportError, match="has format 2, this intentkv reads 1"):
            read_trace(file)


class TestCommand:
    def test_the_file_is_for_its_owner_and_nothing_is_left_beside_it(
        self, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        trace, output = two_turns(tmp_path / "trace"), tmp_path / "out" / "r.html"
        assert cli.main(["report", str(trace), "-o", str(output)]) == 1
        assert "cannot write" in capsys.readouterr().err
        output.parent.mkdir()
        output.write_text("old")
        assert cli.main(["report", str(trace.parent), "-o", str(output)]) == 0
        assert capsys.readouterr().out.strip() == str(output)
        assert stat.S_IMODE(output.stat().st_mode) == 0o600 and list(output.parent.iterdir()) == [output]

    def test_one_session_of_many(self, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        teller = Teller(tmp_path / "trace")
        for name in ("anna", "bert"):
            teller.turn(name, [1, 2, 3], [4], query=(1, 3))
        trace, output = teller.close(), tmp_path / "r.html"
        assert cli.main(["report", str(trace), "--session", "bert", "-o", str(output)]) == 0
        assert "bert" in output.read_text() and "anna" not in output.read_text()
        assert cli.main(["report", str(trace), "--session", "carl", "-o", str(output)]) == 1
        assert "there are: anna, bert" in capsys.readouterr().err

    def test_a_page_holds_only_so_much_text(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("intentkv.report.view.TEXT_TOKENS", 30)
        teller = Teller(tmp_path)
        teller.turn("calm", list(range(25)), [1], query=(20, 25))
        teller.turn("long", list(range(40)), [1], query=(35, 40), drop=[5])
        teller.turn("busy", list(range(25)), [1], query=(20, 25), drop=[5])
        page = build_page(read_trace(teller.close()), Numbers())
        assert [view.name for view in page.sessions] == ["busy"]  # what dropped something comes first
        assert [session.name for session in page.others] == ["long", "calm"]
