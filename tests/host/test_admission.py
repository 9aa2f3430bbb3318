"""Prompts larger than the pool at the scheduler's door: SGLang's own bound, with ours around it."""

from types import SimpleNamespace

import pytest
from sglang.srt.managers.schedule_batch import Req
from sglang.srt.managers.scheduler import Scheduler
from sglang.srt.runtime_context import get_parallel

from intentkv.engine.admission import bound_answer, lift_length_limit
from tests.host.pools import publish_settings
from tests.host.world import World

publish_settings()
POOL, CONTEXT, PEAK = 4000, 16_000, 1500


@pytest.fixture(params=[1, 16], ids=lambda page_size: f"page{page_size}")
def world(request: pytest.FixtureRequest) -> World:
    world = World("rust", request.param, POOL, context=CONTEXT)
    world.cache.peak = lambda req, length: PEAK
    return world


def bounded(world: World, length: int, session: str | None, new: int, chunk: int | None = 512) -> Req:
    """A request of `length` tokens, as the scheduler would queue it."""
    scheduler = SimpleNamespace(
        tree_cache=world.cache,
        token_to_kv_pool_allocator=world.allocator,
        page_size=world.page_size,
        max_total_num_tokens=POOL,
        max_req_len=CONTEXT - 1,
        max_new_tokens_limit=None,
        kv_shard_widening=1,
        sliding_window_size=None,
        chunked_prefill_size=chunk,
    )
    req = world.request(range(length), session, new=new)
    with get_parallel().override(tp_rank=0):
        bound_answer(Scheduler.init_req_max_new_tokens, scheduler, req)
    return req


def test_admission_lets_a_long_session_answer(world: World) -> None:
    req = bounded(world, 12_000, "s", new=200)
    assert req.to_finish is None and req.sampling_params.max_new_tokens == 200
    req = bounded(world, 3_950, "s", new=200)
    assert req.sampling_params.max_new_tokens == 200, "the prompt fits the pool, its answer beside it only when pruned"


def test_admission_bounds_the_answer_by_what_is_left(world: World) -> None:
    assert POOL - PEAK - 64 < bounded(world, 12_000, "s", new=9_000).sampling_params.max_new_tokens < POOL - PEAK
    assert bounded(world, CONTEXT - 100, "s", new=9_000).sampling_params.max_new_tokens < 100, "the model's context"


def test_admission_leaves_short_prompts_to_sglang(world: World) -> None:
    assert bounded(world, 1_000, "s", new=200).sampling_params.max_new_tokens == 200
    stock = bounded(world, 3_900, None, new=200)
    assert stock.to_finish is None and 0 < stock.sampling_params.max_new_tokens < 100


@pytest.mark.parametrize("session", ["s", None])
def test_admission_refuses_what_can_never_fit(world: World, session: str | None) -> None:
    world.cache.peak = lambda req, length: POOL
    req = bounded(world, 12_000, session, new=200)
    assert "12000 tokens" in req.to_finish.message and "4000" in req.to_finish.message


def test_admission_refuses_without_chunks(world: World) -> None:
    assert bounded(world, 12_000, "s", new=200, chunk=None).to_finish is not None


def test_admission_refuses_in_the_mask_layout(world: World) -> None:
    world.cache.layout = "mask"
    assert bounded(world, 12_000, "s", new=200).to_finish is not None


def test_length_limit_is_the_models_context() -> None:
    worker = SimpleNamespace(model_config=SimpleNamespace(context_len=CONTEXT))
    info = (POOL, 8192, 64, None, POOL - 1, POOL - 6, 0, "cpu", None, 64, CONTEXT, POOL)
    assert lift_length_limit(info, worker) == (
        POOL,
        8192,
        64,
        None,
        CONTEXT - 1,
        CONTEXT - 6,
        0,
        "cpu",
        None,
        64,
        CONTEXT,
        POOL,
    )
