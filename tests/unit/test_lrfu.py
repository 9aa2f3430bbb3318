"""LRFU keep scores and access vectors, beside loops that do what the formulas say."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from intentkv.score.access import CLASSES, access_class
from intentkv.score.lrfu import KeepScores, SessionKeepScores, nucleus


def loop_nucleus(attention: list[float], top_p: float) -> list[bool]:
    """Take the highest entry, the earlier of equals, until `top_p` of the mass is there."""
    hits, mass = [False] * len(attention), 0.0
    total = sum(attention)
    while total > 0 and mass < top_p * total:
        left = [i for i, taken in enumerate(hits) if not taken]
        best = max(left, key=lambda i: (attention[i], -i))
        if attention[best] == 0:
            break
        hits[best] = True
        mass += attention[best]
    return hits


def loop_history(regions: list[tuple[list[int], list[float]]], decay: float, top_p: float) -> tuple[dict, dict]:
    """Keep scores and access vectors of every position, one at a time."""
    scores: dict[int, float] = {}
    vectors: dict[int, list[bool]] = {}
    for visible, attention in regions:
        hits = loop_nucleus(attention, top_p)
        for position in scores:
            scores[position] *= decay
        for position, score, hit in zip(visible, attention, hits, strict=True):
            scores[position] = scores.get(position, 0.0) + (score if hit else 0.0)
            vectors.setdefault(position, []).append(hit)
    return scores, vectors


def loop_class(vector: list[bool]) -> str | None:
    if not any(vector):
        return None
    if not vector[0]:
        return "cold_start"
    last = max(i for i, hit in enumerate(vector) if hit)
    return "continuous" if all(vector[: last + 1]) else "intermittent"


def random_history(rng: np.random.Generator) -> list[tuple[list[int], list[float]]]:
    """Regions of a growing text of which entries disappear; weights in 64ths, so that every sum is exact."""
    length, gone = 0, np.zeros(200, bool)
    regions = []
    for _ in range(rng.integers(1, 9)):
        length += int(rng.integers(1, 20))
        gone[:length] |= rng.random(length) < 0.15
        visible = np.flatnonzero(~gone[:length])
        weights = rng.integers(0, 6, len(visible)) * (rng.random(len(visible)) < 0.7)
        regions.append((visible.tolist(), (weights / 64).tolist()))
    return regions


def test_a_thousand_random_histories_are_what_the_loop_says() -> None:
    rng = np.random.default_rng(0)
    met = dict.fromkeys([*CLASSES, None], 0)
    for _ in range(1000):
        regions = random_history(rng)
        decay = float(rng.choice([0.0, 0.25, 0.5, 1.0]))
        top_p = float(rng.choice([0.5, 0.75, 0.9, 1.0]))
        keep = KeepScores(decay, top_p)
        for visible, attention in regions:
            keep.update(np.array(attention, np.float32), np.array(visible, np.int64))
        scores, vectors = loop_history(regions, decay, top_p)
        positions = np.array(sorted(scores), np.int64)
        assert keep.at(positions).tolist() == [scores[p] for p in positions]
        for position, vector in vectors.items():
            of = loop_class(vector)
            assert keep.access.of(position) == of == access_class(vector)
            met[of] += 1
        counts = {name: sum(loop_class(v) == name for v in vectors.values()) for name in CLASSES}
        assert keep.access.counts() == counts
    assert min(met.values()) > 100


@given(st.lists(st.integers(0, 8), max_size=30), st.sampled_from([0.1, 0.5, 0.9, 1.0]))
def test_the_nucleus_is_the_smallest_set_that_reaches_the_mass(weights: list[int], top_p: float) -> None:
    attention = np.array(weights, np.float32)
    hits = nucleus(attention, top_p)
    assert hits.tolist() == loop_nucleus([float(w) for w in weights], top_p)
    if attention.sum() > 0:
        assert attention[hits].sum() >= top_p * attention.sum() * (1 - 1e-6)
        assert attention[hits].sum() - attention[hits].min() < top_p * attention.sum()


def test_decay_zero_is_recency_and_decay_one_is_frequency() -> None:
    both = np.arange(2)
    for decay, expected in ((0.0, [0.0, 1.0]), (1.0, [3.0, 1.0])):
        keep = KeepScores(decay, 0.9)
        for _ in range(3):
            keep.update(np.array([1.0, 0.0], np.float32), both)
        keep.update(np.array([0.0, 1.0], np.float32), both)
        assert keep.at(both).tolist() == expected


def test_an_intermittent_entry_outlives_a_stale_one() -> None:
    """What ActKV wants of the rule: a strong entry survives a pause, a weak one that was read all the time goes."""
    keep = KeepScores(0.5, 0.9)
    both = np.arange(2)
    for region in ([0.8, 0.2], [0.0, 0.2], [0.8, 0.2], [0.0, 0.2]):
        keep.update(np.array(region, np.float32), both)
    strong, weak = keep.at(both)
    assert strong > weak > 0
    assert [keep.access.of(0), keep.access.of(1)] == ["intermittent", "continuous"]


def test_the_scores_follow_the_session_across_turns() -> None:
    sessions = SessionKeepScores(0.5, 0.9, 8)
    first = np.arange(10, dtype=np.int32)
    scores = sessions.open("a", first)
    scores.update(np.full(10, 0.1, np.float32), np.arange(10))
    sessions.note("a", first, scores)

    longer = sessions.open("a", np.arange(14, dtype=np.int32))
    assert longer.at(np.arange(14)).tolist() == pytest.approx([0.1] * 9 + [0.0] * 5)  # 90 % of the mass are 9 of 10
    edited = sessions.open("a", np.array([0, 1, 2, 3, 99, 5], np.int32))
    assert edited.at(np.arange(6)).tolist() == pytest.approx([0.1] * 4 + [0.0] * 2)
    longer.update(np.ones(14, np.float32), np.arange(14))
    assert sessions.open("a", first).at(np.arange(10)).tolist() == pytest.approx([0.1] * 9 + [0.0])
    assert not sessions.open("b", first).at(np.arange(10)).any()


def test_sessions_end_least_recently_used_first_and_with_a_flush() -> None:
    sessions = SessionKeepScores(0.5, 0.9, 2)
    tokens = np.arange(3, dtype=np.int32)
    for name in "ab":
        scores = sessions.open(name, tokens)
        scores.update(np.ones(3, np.float32), np.arange(3))
        sessions.note(name, tokens, scores)
    sessions.open("a", tokens)
    sessions.note("c", tokens, sessions.open("c", tokens))
    assert sessions.open("a", tokens).values.any() and not sessions.open("b", tokens).values.any()
    sessions.clear()
    assert len(sessions) == 0 and not sessions.open("a", tokens).values.any()


@pytest.mark.parametrize("bad", [(-0.1, 0.9, 1), (1.1, 0.9, 1), (0.5, 0.0, 1), (0.5, 1.1, 1), (0.5, 0.9, 0)])
def test_bad_settings_are_refused(bad: tuple) -> None:
    with pytest.raises(ValueError, match="expected a decay in"):
        SessionKeepScores(*bad)
