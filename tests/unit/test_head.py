"""The residual head: its size, the day it has learned nothing, its gradients, and its features against obvious loops."""

import dataclasses
import math

import pytest
import torch
from torch import Tensor

from intentkv.score.base import ScoreInput
from intentkv.score.head import features
from intentkv.score.head.features import mean_keys, residual
from intentkv.score.head.model import ResidualHead
from intentkv.score.intent_head import IntentHeadScorer
from intentkv.score.rule import RuleScorer


def make_input(
    n: int,
    q: int = 9,
    *,
    layers: int = 3,
    kv_heads: int = 2,
    group: int = 2,
    dim: int = 16,
    dtype: torch.dtype = torch.float32,
) -> tuple[ScoreInput, list[Tensor]]:
    generator = torch.Generator().manual_seed(n + q)
    keys = [torch.randn(n + q + 7, kv_heads, dim, generator=generator).to(dtype) for _ in range(layers)]
    slots = torch.randperm(n + q + 7, generator=generator)
    memory = torch.randn(layers, kv_heads * group, dim, generator=generator)
    x = ScoreInput(
        layer_keys=keys.__getitem__,
        slots=slots[:n],
        positions=torch.arange(n),
        share=0.25,
        segments=torch.zeros_like(torch.arange(n)),
        memory=torch.nn.functional.normalize(memory, dim=-1),
        query=memory,
        seed=0,
        num_layers=layers,
        query_slots=slots[n : n + q],
    )
    return x, keys


def trained(dim: int, seed: int = 3) -> ResidualHead:
    """A head whose every weight is drawn."""
    torch.manual_seed(seed)
    head = ResidualHead(dim)
    for parameter in head.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    return head


def loop(head: ResidualHead, x: ScoreInput, keys: list[Tensor], rule: Tensor) -> Tensor:
    """The formula of the correction, candidate by candidate, in float64, with keys expanded to query heads."""
    group = x.memory.shape[1] // keys[0].shape[1]
    expanded = torch.stack([k.double().repeat_interleave(group, dim=1) for k in keys])  # [L, S, H_q, D]
    memory = x.memory.double().mean(dim=(0, 1))
    weights = {name: value.double() for name, value in head.state_dict().items()}
    span = [expanded[:, slot].mean(dim=(0, 1)) for slot in x.query_slots.tolist()]
    result = []
    for slot, score in zip(x.slots.tolist(), rule.double(), strict=True):
        key = expanded[:, slot].mean(dim=(0, 1))
        phi = torch.cat([key, memory, key * memory, score.view(1)])
        context = []
        for h in range(4):
            part = slice(32 * h, 32 * h + 32)
            query = (weights["query.weight"] @ phi + weights["query.bias"])[part]
            ks = [(weights["key.weight"] @ k + weights["key.bias"])[part] for k in span]
            vs = [(weights["value.weight"] @ k + weights["value.bias"])[part] for k in span]
            shares = torch.softmax(torch.stack([query @ k for k in ks]) / math.sqrt(32), 0)
            context.append(sum(share * v for share, v in zip(shares, vs, strict=True)))
        hidden = weights["hidden.weight"] @ torch.cat([phi, *context]) + weights["hidden.bias"]
        hidden = 0.5 * hidden * (1 + torch.erf(hidden / math.sqrt(2)))
        result.append(weights["alpha"] * (weights["output.weight"] @ hidden + weights["output.bias"]))
    return torch.cat(result)


@pytest.mark.parametrize(("dim", "parameters"), [(128, 214_274), (64, 124_162)])
def test_the_parameter_count(dim: int, parameters: int) -> None:
    assert sum(p.numel() for p in ResidualHead(dim).parameters()) == parameters


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize(("n", "q"), [(1, 1), (300, 20), (40, 0)])
def test_on_day_zero_the_score_is_the_published_rule_bit_for_bit(n: int, q: int, dtype: torch.dtype) -> None:
    x, _ = make_input(n, q, dtype=dtype)
    rule = RuleScorer("intent-rule", temperature=1.0).score(x)
    score = IntentHeadScorer(ResidualHead(16)).score(x)
    assert score.dtype == torch.float32
    assert torch.equal(score.view(torch.int32), rule.view(torch.int32))


def gradients(head: ResidualHead) -> dict[str, float]:
    x, keys = make_input(50)
    rule = RuleScorer("intent-rule", temperature=1.0).score(x)
    every = mean_keys(keys.__getitem__, torch.arange(len(keys[0])), 3)
    score = rule + head(every[x.slots], x.memory.mean(dim=(0, 1)), rule, every[x.query_slots])
    torch.nn.functional.binary_cross_entropy_with_logits(score, (torch.arange(50) < 5).float()).backward()
    return {name: float(p.grad.abs().sum()) for name, p in head.named_parameters() if p.grad is not None}


def test_a_new_head_learns_at_the_first_step_and_all_of_it_at_the_second() -> None:
    torch.manual_seed(0)
    head = ResidualHead(16)
    first = gradients(head)
    assert first["output.weight"] > 0
    assert first["output.bias"] > 0
    with torch.no_grad():
        head.output.weight -= 0.1 * head.output.weight.grad
    head.zero_grad()
    second = gradients(head)
    # A bias on the attention's keys shifts all logits alike and changes nothing, for any weights.
    assert all(value > 0 for name, value in second.items() if name != "key.bias"), second


def test_alpha_zero_with_a_zero_layer_is_a_dead_saddle() -> None:
    head = ResidualHead(16)
    torch.nn.init.zeros_(head.alpha)
    assert set(gradients(head).values()) == {0.0}
    torch.nn.init.ones_(head.alpha)
    head.zero_grad()
    assert gradients(head)["output.weight"] > 0


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize(("n", "q"), [(1, 1), (40, 9), (7, 33)])
def test_the_correction_equals_the_loop(n: int, q: int, dtype: torch.dtype) -> None:
    x, keys = make_input(n, q, dtype=dtype)
    head = trained(16)
    rule = RuleScorer("intent-rule", temperature=1.0).score(x)
    expected = loop(head, x, keys, rule)
    assert torch.allclose(residual(head, x, rule).double(), expected, rtol=1e-4, atol=1e-5)
    assert torch.allclose(IntentHeadScorer(head).score(x).double(), rule + expected, rtol=1e-4, atol=1e-5)


def test_chunks_change_nothing_but_rounding(monkeypatch: pytest.MonkeyPatch) -> None:
    x, keys = make_input(257)
    head = trained(16)
    rule = RuleScorer("intent-rule", temperature=1.0).score(x)
    expected = loop(head, x, keys, rule)
    for workspace in (20_000, 200_000):
        monkeypatch.setattr(features, "WORKSPACE_BYTES", workspace)
        assert torch.allclose(residual(head, x, rule).double(), expected, rtol=1e-4, atol=1e-5)


def test_an_empty_history_and_an_empty_query_span() -> None:
    head = trained(16)
    assert IntentHeadScorer(head).score(make_input(0)[0]).shape == (0,)
    without, _ = make_input(12, 0)
    assert torch.isfinite(IntentHeadScorer(head).score(without)).all()


def test_the_end_of_a_very_long_query_span_is_what_is_attended_to(monkeypatch: pytest.MonkeyPatch) -> None:
    x, _ = make_input(20, 30)
    head = trained(16)
    cut = dataclasses.replace(x, query_slots=x.query_slots[-8:])
    expected = IntentHeadScorer(head).score(cut)
    assert not torch.equal(IntentHeadScorer(head).score(x), expected)
    monkeypatch.setattr(features, "SPAN_TOKENS", 8)
    assert torch.equal(IntentHeadScorer(head).score(x), expected)


@pytest.mark.parametrize(("n", "q"), [(16384, 200), (2048, 12000)], ids=["long history", "long query span"])
@pytest.mark.usefixtures("one_thread")
def test_the_workspace_stays_below_32_mib_whatever_the_length(n: int, q: int) -> None:
    x, _ = make_input(n, q, layers=1, kv_heads=8, group=1, dim=128, dtype=torch.bfloat16)
    scorer = IntentHeadScorer(trained(128))
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        scores = scorer.score(x)
    events = [e for e in profile.profiler.kineto_results.events() if e.name() == "[memory]"]  # type: ignore[union-attr]
    held = peak = 0
    for event in sorted(events, key=lambda e: e.start_ns()):
        held += event.nbytes()
        peak = max(peak, held)
    assert peak > scores.nbytes, "the profiler saw the allocations"
    assert peak - scores.nbytes < 32 * 2**20


def test_inputs_and_head_are_left_alone() -> None:
    x, keys = make_input(40)
    head = trained(16)
    held = [x.memory, x.slots, x.query_slots, *keys, *head.state_dict().values()]
    before = [tensor.clone() for tensor in held]
    IntentHeadScorer(head).score(x)
    assert all(torch.equal(a, b) for a, b in zip(before, held, strict=True))


def test_a_head_of_another_dimension_is_refused() -> None:
    with pytest.raises(ValueError, match="the head is for D = 32, the keys have D = 16"):
        IntentHeadScorer(ResidualHead(32)).score(make_input(5)[0])
