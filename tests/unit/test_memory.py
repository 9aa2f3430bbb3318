"""QueryMemory: norm, decay, the least recently used session, and no way from one key to another."""

import math

import pytest
import torch

from intentkv.observe.session import session_key
from intentkv.score.memory import QueryMemory


def enc(seed: int, shape: tuple[int, ...] = (3, 4, 16)) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)) * 5


def test_every_head_has_unit_norm_after_every_update() -> None:
    memory = QueryMemory(0.5, 4)
    for turn in range(5):
        result = memory.update("s", enc(turn).to(torch.bfloat16))
        assert result.dtype == torch.float32
        assert torch.allclose(result.norm(dim=-1), torch.ones(3, 4))


def test_the_recurrence_is_the_published_one() -> None:
    memory = QueryMemory(0.7, 4)
    expected = torch.zeros(3, 4, 16, dtype=torch.float64)
    for turn in range(6):
        expected = math.exp(-0.7) * expected + enc(turn).double()
        expected = expected / expected.norm(dim=-1, keepdim=True)
        result = memory.update("s", enc(turn))
        assert torch.allclose(result.double(), expected, atol=1e-6)
    assert torch.equal(memory.get("s"), result)


def test_a_large_decay_remembers_the_last_turn_only() -> None:
    memory = QueryMemory(100, 4)
    memory.update("s", enc(1))
    assert torch.allclose(memory.update("s", enc(2)), torch.nn.functional.normalize(enc(2), dim=-1), atol=1e-6)


def test_zero_queries_stay_finite() -> None:
    memory = QueryMemory(0.5, 4)
    assert torch.equal(memory.update("s", torch.zeros(1, 2, 8)), torch.zeros(1, 2, 8))
    known = memory.update("s", enc(1, (1, 2, 8)))
    assert torch.allclose(memory.update("s", torch.zeros(1, 2, 8)), known)


def test_a_preview_writes_nothing() -> None:
    memory = QueryMemory(0.5, 4)
    first = memory.preview("s", enc(1))
    assert len(memory) == 0
    assert torch.equal(memory.update("s", enc(1)), first)
    second = memory.preview("s", enc(2))
    assert torch.equal(memory.get("s"), first)
    assert torch.equal(memory.update("s", enc(2)), second)


def test_a_result_handed_out_is_not_written_to() -> None:
    memory = QueryMemory(0.5, 4)
    source = enc(1)
    first = memory.update("s", source)
    kept = first.clone()
    source.zero_()
    memory.update("s", enc(2))
    assert torch.equal(first, kept)


def test_the_least_recently_used_of_1024_sessions_goes_first() -> None:
    memory = QueryMemory(0.5, 1024)
    for session in range(1024):
        memory.update(str(session), torch.ones(1, 1, 2))
    assert memory.get("0") is not None
    memory.update("1", torch.ones(1, 1, 2))
    memory.update("new", torch.ones(1, 1, 2))
    memory.update("newer", torch.ones(1, 1, 2))
    assert len(memory) == 1024
    assert memory.get("2") is None
    assert memory.get("3") is None
    assert memory.get("0") is not None
    assert memory.get("1") is not None


def test_sessions_do_not_touch_each_other() -> None:
    together = QueryMemory(0.5, 64)
    alone = [QueryMemory(0.5, 1) for _ in range(8)]
    for turn in range(4):
        for session in range(8):
            mixed = together.update(str(session), enc(100 * session + turn))
            assert torch.equal(mixed, alone[session].update("x", enc(100 * session + turn)))


def test_salts_do_not_share_a_memory() -> None:
    memory = QueryMemory(0.5, 64)
    common = {"session_id": "same", "span_tokens": None, "prompt_ids": [1], "first_user_end": None, "rid": "r"}
    keys = [
        session_key(**common, extra_key=extra, cache_salt=salt).value for extra in (None, "a") for salt in (None, "b")
    ]
    for i, key in enumerate(keys):
        assert torch.equal(memory.update(key, enc(i)), torch.nn.functional.normalize(enc(i), dim=-1))
    assert len(memory) == 4


def test_forget_and_clear() -> None:
    memory = QueryMemory(0.5, 4)
    memory.update("a", enc(1))
    memory.update("b", enc(1))
    memory.forget("a")
    memory.forget("unknown")
    assert (memory.get("a"), len(memory)) == (None, 1)
    memory.clear()
    assert len(memory) == 0


@pytest.mark.parametrize("shape", [(3, 4, 8), (2, 4, 16), (4, 16), (3, 1, 4, 16)])
def test_another_shape_is_refused_and_changes_nothing(shape: tuple[int, ...]) -> None:
    memory = QueryMemory(0.5, 4)
    known = memory.update("s", enc(1))
    with pytest.raises(ValueError, match=r"expected queries of shape \[3, 4, 16\], got \["):
        memory.update("s", enc(2, shape))
    assert torch.equal(memory.get("s"), known)


@pytest.mark.parametrize(("decay", "sessions"), [(-0.1, 4), (math.nan, 4), (math.inf, 4), (0.5, 0)])
def test_bad_arguments_are_refused(decay: float, sessions: int) -> None:
    with pytest.raises(ValueError, match="expected a finite decay >= 0 and max_sessions >= 1"):
        QueryMemory(decay, sessions)
