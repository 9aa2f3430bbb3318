"""Action regions of hand-written answers, however the text is cut."""

import itertools
import random
import re
from collections.abc import Iterable

import pytest

from intentkv.observe.action_regions import ActionRegions, Detector, make_detector
from intentkv.observe.call_templates import template_of
from tests.unit import chat_templates
from tests.unit.action_streams import STREAMS

CASES = [pytest.param(t, text, id=f"{t}: {name}") for t, name, text in STREAMS]


def regions_of(pieces: Iterable[str], template: str) -> list[tuple[int, int]]:
    """The regions of a whole answer as character ranges `[start, end)`, for pieces of any size."""
    detector = make_detector(template)
    edges = [edge for piece in pieces for edge in detector.feed(piece)] + detector.finish()
    starts = [edge.at for edge in edges if edge.kind == "enter"]
    ends = [edge.at for edge in edges if edge.kind == "leave"]
    return list(zip(starts, ends, strict=True))


def expected(marked: str) -> tuple[str, list[tuple[int, int]]]:
    """The text without its marks, and the regions between them."""
    places: list[int] = []
    for mark in re.finditer("[«»]", marked):
        places.append(mark.start() - len(places))
    return re.sub("[«»]", "", marked), list(zip(places[::2], places[1::2], strict=True))


def test_there_are_enough_streams() -> None:
    assert len(STREAMS) >= 40
    assert {template for template, _, _ in STREAMS} >= {"hermes", "harmony", "llama", "answer"}


@pytest.mark.parametrize(("template", "marked"), CASES)
def test_fed_whole(template: str, marked: str) -> None:
    text, regions = expected(marked)
    assert regions_of([text], template) == regions


@pytest.mark.parametrize(("template", "marked"), CASES)
def test_fed_character_by_character(template: str, marked: str) -> None:
    text, regions = expected(marked)
    assert regions_of(text, template) == regions


@pytest.mark.parametrize(("template", "marked"), CASES)
def test_split_at_random(template: str, marked: str) -> None:
    text, regions = expected(marked)
    rng = random.Random(marked)
    for _ in range(30):
        cuts = sorted(rng.randrange(len(text) + 1) for _ in range(rng.randrange(8)))
        edges = [0, *cuts, len(text)]
        assert regions_of([text[a:b] for a, b in itertools.pairwise(edges)], template) == regions


@pytest.mark.parametrize("tags_are_tokens", [True, False], ids=["tags are tokens", "tags in pieces"])
@pytest.mark.parametrize(("template", "marked"), CASES)
def test_fed_token_by_token(template: str, marked: str, tags_are_tokens: bool) -> None:
    """By a tokenizer that knows the tags as tokens, as Qwen's does, and by one that cuts them into words and signs."""
    text, regions = expected(marked)
    tags = "<tool_call> </tool_call> <|channel|> <|message|> <|call|> <|start|> <|end|> <|python_tag|>"
    tokenizer = chat_templates.ToyTokenizer(tags if tags_are_tokens else "\0")
    ids = tokenizer.encode(text)
    tracker = ActionRegions(make_detector(template), lambda token: tokenizer.decode([token]))
    assert tokenizer.decode(ids) == text
    edges = []
    for token in ids:
        edges += tracker.advance(token)
        open_regions = sum(1 if edge.kind == "enter" else -1 for edge in edges)
        assert tracker.inside == bool(open_regions)
    edges += tracker.finish()
    assert tracker.tokens == len(ids) and not tracker.inside
    assert [edge.at for edge in edges] == [place for region in regions for place in region]


def test_several_calls_in_one_increment_are_told_in_order() -> None:
    detector: Detector = make_detector("hermes")
    text = '<tool_call>{"name": "f"}</tool_call><tool_call>{"name": "g"}</tool_call><tool_call>{'
    assert [edge.kind for edge in detector.feed(text)] == ["enter", "leave", "enter", "leave", "enter"]
    assert detector.inside
    assert [edge.kind for edge in detector.finish()] == ["leave"]
    assert detector.finish() == []


@pytest.mark.parametrize(
    ("template", "name"),
    [
        (chat_templates.QWEN, "hermes"),
        (chat_templates.CHATML, "hermes"),
        (chat_templates.HARMONY, "harmony"),
        (chat_templates.LLAMA3, "llama"),
        (chat_templates.GEMMA, None),
        (chat_templates.VICUNA, None),
        (None, None),
    ],
)
def test_auto_picks_from_the_template(template: str | None, name: str | None) -> None:
    assert template_of(template) == name


@pytest.mark.parametrize("pattern", ["", "hermess", "...", "<a>...", "...</a>", "x" * 61 + "...y"])
def test_a_bad_pattern_is_refused(pattern: str) -> None:
    with pytest.raises(ValueError, match="OPEN...CLOSE"):
        make_detector(pattern)
