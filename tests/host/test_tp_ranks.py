"""The engine's ranks over gloo, in two processes: what they add up, and that a difference of opinion is not served."""

from __future__ import annotations

import socket
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import distributed

from intentkv.engine.ranks import Agreement, TensorParallelRanks

SIZE = 2


def on_rank(rank: int, port: int, work: Callable[[Any], Any]) -> Any:
    torch.set_num_threads(1)
    distributed.init_process_group("gloo", f"tcp://127.0.0.1:{port}", world_size=SIZE, rank=rank)
    everyone = distributed.group.WORLD
    try:
        return work(
            SimpleNamespace(
                world_size=SIZE, rank_in_group=rank, first_rank=0, device_group=everyone, cpu_group=everyone
            )
        )
    finally:
        distributed.destroy_process_group()


@pytest.fixture(scope="module")
def processes() -> Any:
    with ProcessPoolExecutor(SIZE, mp_context=get_context("spawn")) as pool:
        yield pool


def on_both(pool: ProcessPoolExecutor, work: Callable[[Any], Any]) -> list[Any]:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    running = [pool.submit(on_rank, rank, port, work) for rank in range(SIZE)]
    return [each.result(timeout=120) for each in running]


def add_up(group: Any) -> tuple[Any, ...]:
    ranks = TensorParallelRanks(group, torch.device("cpu"))
    own = torch.tensor([0.1, torch.inf, 3.0 + ranks.rank])
    return ranks.size, ranks.rank, *(call(own.clone()).tolist() for call in (ranks.sum, ranks.mean, ranks.first))


def test_tp_ranks_sum_average_and_follow_the_first(processes: ProcessPoolExecutor) -> None:
    first, second = on_both(processes, add_up)
    assert first[:2] == (2, 0) and second[:2] == (2, 1)
    assert first[2:] == second[2:]
    assert first[2:] == ([pytest.approx(0.2), float("inf"), 7.0], [pytest.approx(0.1), float("inf"), 3.5],
                         [pytest.approx(0.1), float("inf"), 3.0])  # fmt: skip


def decide(group: Any, rank_drops: list[int], *, check: bool) -> tuple[int, list[str]]:
    """One event on which all agree, and one at which rank r drops `rank_drops[r]` tokens; digest and what an audit shows."""
    agreement = Agreement(group, check=check)
    agreement.decided("s" * 64, 100, np.arange(10))
    agreement.decided("t" * 64, 300, np.arange(rank_drops[group.rank_in_group]))
    return agreement.digest, agreement.audit([f"fault of {group.rank_in_group}"])


def agree(group: Any) -> tuple[int, list[str]]:
    return decide(group, [20, 20], check=True)


def differ(group: Any) -> tuple[int, list[str]]:
    return decide(group, [20, 21], check=False)


def differ_where_it_is_checked(group: Any) -> str:
    with pytest.raises(RuntimeError) as raised:
        decide(group, [20, 21], check=True)
    return str(raised.value)


def test_tp_ranks_of_one_mind_have_one_digest(processes: ProcessPoolExecutor) -> None:
    (one, faults), (other, others) = on_both(processes, agree)
    assert one == other != 0 and faults == others == ["rank 0: fault of 0", "rank 1: fault of 1"]


def test_tp_masks_that_differ_show_in_the_audit(processes: ProcessPoolExecutor) -> None:
    (one, (*_, fault)), (other, _) = on_both(processes, differ)
    assert one != other and "different tokens" in fault and "INTENTKV_CHECK_RANKS=1" in fault


def test_tp_masks_that_differ_are_an_error_on_every_rank(processes: ProcessPoolExecutor) -> None:
    said = on_both(processes, differ_where_it_is_checked)
    assert said[0] == said[1]
    assert "expected one keep mask" in said[0] and "please report" in said[0]
    assert f"rank 0 drops 20 of session {'t' * 12} at 300" in said[0] and "rank 1 drops 21" in said[0]


def test_a_rank_that_is_alone_asks_nobody() -> None:
    agreement = Agreement(None, check=True)
    agreement.decided("s" * 64, 100, np.arange(10))
    assert agreement.audit(["mine"]) == ["mine"] and agreement.digest != 0
