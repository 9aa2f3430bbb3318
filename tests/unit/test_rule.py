"""The rule score against an obvious loop in float64."""

import math

import pytest
import torch
from torch import Tensor

from intentkv.kernels.reference import rule_score_reference
from intentkv.score.base import ScoreInput
from intentkv.score.rule import RuleScorer

pytestmark = pytest.mark.usefixtures("one_thread")


def make_input(
    n: int,
    *,
    layers: int = 2,
    kv_heads: int = 2,
    group: int = 3,
    dim: int = 64,
    dtype: torch.dtype = torch.float32,
    seed: int = 0,
) -> tuple[ScoreInput, list[Tensor]]:
    """Random paged keys, more than are used, in random slots; M of unit norm."""
    generator = torch.Generator().manual_seed(seed)
    pool = max(8, min(n + 5, 4096))
    keys = [torch.randn(pool, kv_heads, dim, generator=generator).to(dtype) * 3 for _ in range(layers)]
    slots = torch.randperm(pool, generator=generator)[:n] if n <= pool else torch.randint(pool, (n,))
    memory = torch.randn(layers, kv_heads * group, dim, generator=generator)
    memory = torch.nn.functional.normalize(memory, dim=-1)
    x = ScoreInput(
        layer_keys=keys.__getitem__,
        slots=slots,
        positions=torch.arange(n) * 2,
        memory=memory,
        query=memory,
        seed=0,
        num_layers=layers,
        share=0.25,
        segments=torch.arange(n),
    )
    return x, keys


def loop(x: ScoreInput, keys: list[Tensor], temperature: float) -> Tensor:
    """The formula, one layer and head at a time, in float64."""
    divisor = math.sqrt(x.memory.shape[2]) * temperature
    return sum(rule_score_reference(m.double() / divisor, k, x.slots) for m, k in zip(x.memory, keys, strict=True))


@pytest.mark.parametrize("temperature", [1.0, 0.25, "rescaled"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_equals_the_loop_over_layers_and_heads(dtype: torch.dtype, temperature: float | str) -> None:
    """To the precision of float32; against plain PyTorch the layer is measured in tests/kernels/test_rule_score.py."""
    number = 1 / math.sqrt(64) if temperature == "rescaled" else float(temperature)
    x, keys = make_input(257, layers=3, dtype=dtype)
    scores = RuleScorer("rule", temperature).score(x)  # type: ignore[arg-type]
    assert scores.dtype == torch.float32
    torch.testing.assert_close(scores.double(), loop(x, keys, number), rtol=1e-5, atol=0)


def test_every_head_hands_out_one() -> None:
    x, _ = make_input(300, layers=3, group=4)
    scores = RuleScorer("rule", 1.0).score(x)
    assert scores.sum().item() == pytest.approx(3 * 8, rel=1e-5)
    assert scores.min() >= 0


@pytest.mark.parametrize("layers", [0, 2])
def test_an_empty_history_scores_nothing(layers: int) -> None:
    x, _ = make_input(0, layers=layers)
    scores = RuleScorer("rule", 1.0).score(x)
    assert scores.shape == (0,)
    assert scores.dtype == torch.float32


def test_a_key_that_the_memory_points_at_wins() -> None:
    x, keys = make_input(50, layers=1, kv_heads=1, group=1)
    keys[0][x.slots[17]] = 20 * x.memory[0]
    for temperature in (1.0, "rescaled"):
        assert RuleScorer("rule", temperature).score(x).argmax() == 17  # type: ignore[arg-type]


def test_the_published_temperature_is_flatter() -> None:
    x, _ = make_input(400)
    flat, sharp = (RuleScorer("rule", t).score(x) for t in (1.0, "rescaled"))
    assert flat.max() < sharp.max()
    by_number = RuleScorer("rule", 1 / math.sqrt(64)).score(x)
    assert torch.allclose(sharp, by_number, rtol=1e-4)


def test_an_empty_memory_scores_all_alike() -> None:
    x, _ = make_input(64)
    x.memory.zero_()
    scores = RuleScorer("rule", "rescaled").score(x)
    assert torch.allclose(scores, torch.full((64,), 2 * 6 / 64))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("shape", [(8, 4, 128), (3, 3, 64), (1, 1, 16)], ids=["8x4x128", "3x3x64", "1x1x16"])
def test_the_workspace_stays_below_32_mib_whatever_the_length(shape: tuple[int, int, int], dtype: torch.dtype) -> None:
    kv_heads, group, dim = shape
    n = 2**24 // (kv_heads * dim)  # the keys alone would take 64 MiB in float32
    x, _ = make_input(n, layers=1, kv_heads=kv_heads, group=group, dim=dim, dtype=dtype)
    scorer = RuleScorer("rule", 1.0)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        scores = scorer.score(x)
    events = [e for e in profile.profiler.kineto_results.events() if e.name() == "[memory]"]  # type: ignore[union-attr]
    held, peak = 0, 0
    for event in sorted(events, key=lambda e: e.start_ns()):
        held += event.nbytes()
        peak = max(peak, held)
    assert peak > scores.nbytes, "the profiler saw the allocations"
    assert peak - scores.nbytes < 32 * 2**20


def test_inputs_are_left_alone() -> None:
    x, keys = make_input(40, dtype=torch.bfloat16)
    before = [x.memory.clone(), x.slots.clone(), *(k.clone() for k in keys)]
    RuleScorer("rule", 1.0).score(x)
    assert all(torch.equal(a, b) for a, b in zip(before, [x.memory, x.slots, *keys], strict=True))


@pytest.mark.parametrize("shape", [(8, 2, 32), (8, 4, 64)], ids=["head dimension", "heads"])
def test_keys_of_another_model_are_refused(shape: tuple[int, int, int]) -> None:
    x, keys = make_input(4, layers=1)
    keys[0] = torch.zeros(shape)
    with pytest.raises(
        ValueError, match=r"with one D and a number of KV heads that divides H_q, got \[6, 64\] and \[8, "
    ):
        RuleScorer("rule", 1.0).score(x)


@pytest.mark.parametrize("temperature", [0.0, -1.0, math.inf, math.nan, "hot"])
def test_bad_temperatures_are_refused(temperature: object) -> None:
    with pytest.raises((ValueError, TypeError)):
        RuleScorer("rule", temperature)  # type: ignore[arg-type]
