"""A dead slot with special contents is not a mask; a slot that is not listed is. `pytest -s` prints the table of docs/exact-masking.md."""

from collections.abc import Callable

import pytest
import torch

from intentkv.kernels.attention import paged_attention
from intentkv.kernels.reference import paged_attention_reference

HEADS, DIM, LIVE, DEAD = 4096, 64, 50, 200


class Heads:
    """Many query heads that share one KV head: `LIVE` live slots after slot 0, which dropped positions point to."""

    def __init__(self, dead_key: float) -> None:
        random = torch.Generator().manual_seed(0)
        self.query = torch.randn(1, HEADS, DIM, generator=random)
        self.keys, self.values = (torch.randn(1 + LIVE, 1, DIM, generator=random) for _ in range(2))
        self.keys[0], self.values[0] = dead_key, 0.0
        self.live = torch.arange(1, 1 + LIVE)
        self.exact, self.exact_lse = self._run(paged_attention_reference, self.live)
        self.size = self.exact.norm(dim=-1)

    def _run(self, attention: Callable, slots: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return attention(self.query, self.keys, self.values, [slots], [1], DIM**-0.5)

    def redirected(self) -> tuple[torch.Tensor, torch.Tensor]:
        """The published redirect: dropped positions stay in the list and read slot 0."""
        return self._run(paged_attention, torch.cat((torch.zeros(DEAD, dtype=torch.int64), self.live)))

    def left_out(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Ours: dropped positions are not in the list."""
        return self._run(paged_attention, self.live)

    def relative_error(self, output: torch.Tensor) -> torch.Tensor:
        """`[H_q]`: error of the output over its size."""
        return (output[0].double() - self.exact[0]).norm(dim=-1) / self.size[0]

    def dead_mass(self, lse: torch.Tensor) -> torch.Tensor:
        """`[H_q]`: share of the softmax that dropped positions took."""
        return 1 - (self.exact_lse[0] - lse[0].double()).exp()


@pytest.fixture(scope="module", autouse=True)
def table():
    lines: list[str] = []
    yield lines
    print(f"\n{HEADS} random query heads, {LIVE} live and {DEAD} dropped positions, D = {DIM}, float32 against float64")
    print(f"{'':26}{'collapsed heads':>17}{'softmax taken':>15}{'output error':>14}")
    print("\n".join(lines))


def report(
    table: list[str], name: str, heads: Heads, result: tuple[torch.Tensor, torch.Tensor]
) -> tuple[float, float, float]:
    """Adds a row; returns the share of collapsed heads, the mean share of the softmax taken, the median relative error."""
    output, lse = result
    collapsed = (output[0].norm(dim=-1) < 1e-3 * heads.size[0]).double().mean().item()
    mass = abs(heads.dead_mass(lse).mean().item())
    error = heads.relative_error(output).median().item()
    table.append(f"{name:26}{collapsed:17.1%}{mass:15.1%}{error:14.1e}")
    return collapsed, mass, error


def test_the_published_sentinel_takes_every_second_head(table: list[str]) -> None:
    """K = -10^4: its logit is -10^4 sum(q) / sqrt(D), which is hugely positive wherever sum(q) < 0."""
    heads = Heads(dead_key=-1e4)
    result = heads.redirected()
    collapsed, _, _ = report(table, "K = -10^4, V = 0 (paper)", heads, result)
    assert 0.45 < collapsed < 0.55
    negative = heads.query[0].sum(dim=-1) < 0
    assert torch.equal(result[0][0].norm(dim=-1) < 1e-3 * heads.size[0], negative)


def test_a_zero_key_stays_in_the_denominator(table: list[str]) -> None:
    """K = 0: every dropped position still adds exp(0) to the denominator, which shrinks every head's output."""
    heads = Heads(dead_key=0.0)
    output, lse = heads.redirected()
    collapsed, mass, error = report(table, "K = 0, V = 0", heads, (output, lse))
    expected = heads.exact_lse[0].exp() + DEAD
    torch.testing.assert_close(lse[0].double().exp(), expected, rtol=1e-5, atol=0)
    assert collapsed == 0 and mass > 0.5 and error > 0.5
    assert heads.relative_error(output).min() > 0.1


@pytest.mark.parametrize("dead_key", [-1e4, 0.0, float("nan")])
def test_leaving_the_slot_out_is_exact_whatever_it_holds(table: list[str], dead_key: float) -> None:
    heads = Heads(dead_key)
    result = heads.left_out()
    collapsed, mass, error = report(table, f"left out, slot 0 = {dead_key:g}", heads, result)
    assert collapsed == 0 and mass < 1e-6 and error < 1e-6
    assert heads.relative_error(result[0]).max() < 1e-5
