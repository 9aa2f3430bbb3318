"""The default scorer against an obvious loop."""

from __future__ import annotations

import dataclasses
import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from intentkv.keep.dialogue import newest_that_fit, room
from intentkv.score.intent import LEAST, STEEPNESS, UNGUESSED, IntentScorer, largest_in_segments, word_surprise
from tests.unit.test_baselines import positions_only


def loop(surprise: list[float], words: list[int], segments: list[int], top: int, most: float) -> list[float]:
    """For each token what the words of its segment come to, one word at a time, in float64."""
    sums = []
    for segment in segments:
        totals: dict[int, float] = {}
        for value, word, of in zip(surprise, words, segments, strict=True):
            if of == segment:
                totals[word] = totals.get(word, 0.0) + value
        sums.append(sum(sorted((min(total, most) for total in totals.values()), reverse=True)[:top]))
    return sums


@given(
    st.lists(st.tuples(st.integers(0, 2), st.integers(0, 2), st.floats(0, 20, width=32)), max_size=40),
    st.integers(1, 8),
    st.sampled_from([3.0, UNGUESSED, math.inf]),
)
def test_words_and_segments_equal_the_loop(steps: list[tuple[int, int, float]], top: int, most: float) -> None:
    """Words and segments of any length, with gaps in their numbers; values with ties."""
    segments = torch.tensor([step for step, _, _ in steps], dtype=torch.int64).cumsum(0)
    words = torch.tensor([max(step, of) for step, of, _ in steps], dtype=torch.int64).cumsum(0)
    surprise = torch.tensor([value for _, _, value in steps], dtype=torch.float32)
    sums, lengths = largest_in_segments(word_surprise(surprise, words, most), segments, top)
    expected = loop(surprise.tolist(), words.tolist(), segments.tolist(), top, most)
    torch.testing.assert_close(sums, torch.tensor(expected, dtype=torch.float32))  # up to 40 additions in float32
    assert lengths.tolist() == [segments.tolist().count(segment) for segment in segments.tolist()]


def score(
    surprise: list[float], words: list[int], segments: list[int], said: list[bool] | None = None, share: float = 0.25
) -> list[float]:
    """What `intent` gives each token of a context without any dialogue, or with it where `said`."""
    x = dataclasses.replace(
        positions_only(torch.arange(len(surprise))),
        surprise=torch.tensor(surprise),
        words=torch.tensor(words),
        segments=torch.tensor(segments),
        dialogue=torch.tensor(said or [False] * len(surprise)),
        share=share,
    )
    return IntentScorer().score(x).tolist()


def room_of_loop(worth: dict[int, float], length: dict[int, int], spoken: dict[int, bool]) -> dict[int, int]:
    """For each segment the tokens of all that come before it and its own; of equal worth the later one comes first."""
    room, rooms = 0, {}
    for segment in sorted(worth, key=lambda segment: (worth[segment], segment), reverse=True):
        room += 0 if spoken[segment] else length[segment]
        rooms[segment] = room
    return rooms


@given(
    st.lists(st.tuples(st.integers(0, 1), st.sampled_from([0.5, 1.0, 2.0, 4.0, 8.0])), min_size=1, max_size=30),
    st.sampled_from([0.02, 0.12, 0.25, 0.5, 1.0]),
    st.data(),
)
def test_the_score_is_the_room_at_which_a_segment_is_kept(
    steps: list[tuple[int, float]], share: float, data: st.DataObject
) -> None:
    """Against the loop, with one word a segment, so that its worth can be told; whole segments are dialogue."""
    segments = np.cumsum([step for step, _ in steps]).tolist()
    spoken = {segment: data.draw(st.booleans()) for segment in set(segments)}
    scores = score([value for _, value in steps], segments, segments, [spoken[of] for of in segments], share)
    length = {segment: segments.count(segment) for segment in spoken}
    worth = {
        segment: min(UNGUESSED, sum(value for (_, value), of in zip(steps, segments, strict=True) if of == segment))
        for segment in spoken
    }
    part = max(LEAST, 1 - STEEPNESS * share)
    by_token = room_of_loop({segment: worth[segment] / length[segment] for segment in spoken}, length, spoken)
    by_segment = room_of_loop(worth, length, spoken)
    expected = [-min(by_token[of] / part, by_segment[of] / (1 - part)) for of in segments]
    assert scores == pytest.approx([math.inf if spoken[of] else e for of, e in zip(segments, expected, strict=True)])


def test_a_fact_beats_filler_whole() -> None:
    """A short sentence with a number outlives a long one of mildly surprising words, and stays whole."""
    fact, filler = [3.0, 0.2, 2.4, 2.3, 2.2, 2.4, 0.1], [1.2] * 20
    words, segments = [0, 1, 2, 2, 2, 2, 3, *range(4, 24)], [3] * 7 + [7] * 20
    scores = score(fact + filler, words, segments)
    assert len(set(scores[:7])) == 1 and len(set(scores[7:])) == 1 and scores[0] > scores[7]


def test_a_hash_is_one_word() -> None:
    """However many nats it has, it is worth no more than a number, and costs more."""
    scores = score([3.0, 9.2] + [4.0] * 40, [0, 1] + [2] * 40, [0, 0] + [1] * 40)
    assert scores[0] > scores[-1]


def test_short_facts_and_long_ones_share_the_room() -> None:
    """By the token the short ones would fill the room, by the segment the long ones."""
    short, long = [[2.0, 2.0]] * 20, [[2.0] * 4 + [0.0] * 16] * 3
    surprise = [value for segment in short + long for value in segment]
    segments = [number for number, segment in enumerate(short + long) for _ in segment]
    best = {
        share: np.argsort(score(surprise, list(range(100)), segments, share=share), kind="stable")[::-1]
        for share in (0.5, 0.05)
    }
    assert sorted(best[0.5][:66]) == [*range(14, 40), *range(60, 100)], (
        "0.4 of the room by the token, 0.6 by the segment"
    )
    assert sum(best[0.05][:40] < 40) == 40, "where it is tight, what is worth most by the token comes first"


def test_the_dialogue_comes_first() -> None:
    scores = score([4.0, 4.0, 0.1, 0.1, 5.0], [0, 1, 2, 3, 4], [0, 1, 2, 3, 4], [False, False, True, True, False])
    assert scores[2:4] == [math.inf, math.inf] and scores[0] < scores[1] < scores[4] < 0


@pytest.mark.parametrize("need", ["surprise", "dialogue", "words"])
def test_without_observation_it_says_so(need: str) -> None:
    given = {
        "surprise": torch.zeros(4),
        "dialogue": torch.zeros(4, dtype=torch.bool),
        "words": torch.arange(4),
    }
    x = dataclasses.replace(positions_only(torch.arange(4)), **{**given, need: None})
    with pytest.raises(ValueError, match=f"intent: expected '{need}' in its input"):
        IntentScorer().score(x)


@pytest.mark.parametrize(
    ("tokens", "kept"),
    [
        (3, []),
        (4, [(0, 4)]),  # the newest has 5, of the oldest 4 are live
        (5, [(20, 25)]),
        (8, [(20, 25)]),
        (10, [(20, 25), (0, 4)]),  # the one between has 6
        (11, [(10, 16), (20, 25)]),
        (15, [(10, 16), (20, 25), (0, 4)]),
    ],
)
def test_the_newest_messages_that_fit(tokens: int, kept: list[tuple[int, int]]) -> None:
    said = [(0, 8), (10, 16), (20, 25)]
    positions = np.setdiff1d(np.arange(40), np.arange(4, 8))  # half of the oldest message was dropped before
    chosen = positions[newest_that_fit(said, positions, tokens)]
    assert chosen.tolist() == sorted(p for start, end in kept for p in range(start, end))


def test_the_dialogue_has_a_third_of_the_budget_at_most_and_less_where_it_is_tight() -> None:
    assert [room(budget, 2400) for budget in (0, 300, 600, 1200, 2400)] == [0, 25, 100, 400, 800]
    assert room(10, 0) == 3


def test_a_message_too_long_is_passed_over() -> None:
    chosen = newest_that_fit([(0, 5), (5, 95)], np.arange(100), tokens=20)
    assert np.flatnonzero(chosen).tolist() == list(range(5))
