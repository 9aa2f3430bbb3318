"""The surprise of tokens, against a loop over the vocabulary in float64."""

from __future__ import annotations

import pytest
import torch

from intentkv.kernels import surprise
from intentkv.kernels.reference import token_surprise_reference
from intentkv.kernels.surprise import token_surprise


def case(tokens: int, vocabulary: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    torch.manual_seed(tokens)
    head = torch.randn(vocabulary, 48)
    hidden = torch.randn(tokens, 48)
    targets = torch.randint(vocabulary, (tokens,))
    hidden[::2] += 0.5 * head[targets[::2]]  # half of them were expected
    return hidden.to(dtype), targets, head.to(dtype)


def plain(hidden: torch.Tensor, targets: torch.Tensor, head: torch.Tensor) -> torch.Tensor:
    """What anybody would write, over the whole vocabulary and in the model's precision."""
    return torch.nn.functional.cross_entropy(hidden @ head.T, targets, reduction="none")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_error_is_within_that_of_plain_pytorch(dtype: torch.dtype) -> None:
    hidden, targets, head = case(64, 300, dtype)
    exact = token_surprise_reference(hidden, targets, head, surprise.FREQUENT)
    ours = token_surprise(hidden, targets, head)
    error = (ours - exact).abs().max()
    assert ours.dtype == torch.float32 and error <= 2 * (plain(hidden, targets, head) - exact).abs().max()


def test_rare_targets_join_the_frequent_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(surprise, "FREQUENT", 100)
    hidden, targets, head = case(64, 300, torch.float32)
    assert (targets < 100).any() and (targets >= 100).any()
    exact = token_surprise_reference(hidden, targets, head, 100, scale=0.3)
    torch.testing.assert_close(token_surprise(hidden, targets, head, 0.3).double(), exact, rtol=1e-4, atol=1e-4)


def test_pieces_do_not_show(monkeypatch: pytest.MonkeyPatch) -> None:
    hidden, targets, head = case(70, 300, torch.float32)
    whole = token_surprise(hidden, targets, head)
    monkeypatch.setattr(surprise, "_WORKSPACE_BYTES", 4 * (2 * 300 + 4 * 48) * 16)
    torch.testing.assert_close(token_surprise(hidden, targets, head), whole, rtol=1e-5, atol=1e-5)


def test_a_sure_prediction_is_no_surprise_and_nothing_is_nothing() -> None:
    head = 40 * torch.eye(5)
    assert token_surprise(head, torch.arange(5), head).tolist() == [0.0] * 5
    assert token_surprise(torch.empty(0, 5), torch.empty(0, dtype=torch.int64), head).shape == (0,)


def test_every_reason_is_given() -> None:
    with pytest.raises(ValueError, match=r"expected hidden \[T, E\].*one target a row.*one float dtype.*int64"):
        token_surprise(torch.ones(3, 4), torch.ones(2), torch.ones(9, 5).bfloat16())
