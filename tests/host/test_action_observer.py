"""Attention recovered from SGLang's own pools and our backend, for requests inside an action and no others."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from sglang.srt.model_executor.forward_batch_info import ForwardMode

from intentkv.apply.live_view import LiveViews
from intentkv.config import Settings
from intentkv.engine.action_observer import ActionObserver
from intentkv.engine.action_track import ActionTrack
from intentkv.engine.cpu_attention import CpuAttentionBackend
from intentkv.kernels.reference import recover_attention_reference
from intentkv.observe.action_regions import ActionRegions, make_detector
from intentkv.score.lrfu import KeepScores
from tests.host.actions import Tokenizer, make_request, make_state, say, with_identity
from tests.host.pools import publish_settings
from tests.kernels.host import DIM, H_KV, H_Q, Host

publish_settings()
OPENING = '<tool_call>\n{"name"'


class Bench:
    """One backend, its pools and an observer; requests sit in rows 1, 2, ..."""

    def __init__(self, page_size: int = 1) -> None:
        self.host = Host(page_size)
        self.backend = CpuAttentionBackend(self.host.runner)
        self.views = self.backend.views = LiveViews(self.host.rows.req_to_token)
        self.tokenizer = Tokenizer()
        self.observer = ActionObserver(Settings(), self.tokenizer, None, self.host.pool, self.views, layers=1)
        self.reqs: list = []

    def add(self, rid: str, prompt: int, scorer: str = "actkv"):
        state = make_state(rid, prompt, scorer)
        req = make_request(rid, np.arange(prompt), state)
        self.observer.admit(state, np.arange(prompt))
        self.reqs.append(req)
        self.host.fill_row(len(self.reqs), 200)
        return req

    def step(self, observed: bool = True) -> torch.Tensor:
        """A decode step over all requests; returns its queries `[R, H_q, D]`."""
        lengths = [len(req.origin_input_ids) + len(req.output_ids) for req in self.reqs]
        batch = with_identity(self.host.batch(lengths), [req.rid for req in self.reqs])
        self.observer.begin(batch)
        assert (self.observer._step is not None) == observed
        self.backend.init_forward_metadata(batch)
        q, k, v = self.host.qkv(len(self.reqs))
        self.backend.forward(q, k, v, self.host.layer, batch)
        self.observer.add(self.backend, q, self.host.layer)
        return q.view(-1, H_Q, DIM)

    def exact(self, index: int, query: torch.Tensor) -> torch.Tensor:
        """The mean over KV heads of the attention of request `index`'s query to its live slots, float64."""
        req = self.reqs[index]
        length = len(req.origin_input_ids) + len(req.output_ids)
        slots = self.views.slots(index + 1, length)
        scores, _ = recover_attention_reference(
            query[index : index + 1], self.host.pool.get_key_buffer(0), [slots], DIM**-0.5
        )
        return scores[0].mean(0)


@pytest.mark.parametrize("page_size", [1, 16])
@pytest.mark.parametrize("leaves_lse", [True, False], ids=["LSE of the backend", "LSE computed again"])
def test_the_attention_of_an_action_is_recovered_and_of_nothing_else(page_size: int, leaves_lse: bool) -> None:
    bench = Bench(page_size)
    other, thinking, acting = (
        bench.add("other", 20, "streaming"),
        bench.add("thinking", 30),
        bench.add("acting", 40),
    )
    holes = np.arange(16, 32)
    bench.views.set_holes(3, holes, 40)
    acting.intentkv.holes = holes
    for req, text in ((other, "hello"), (thinking, "I think <tool_call> is"), (acting, OPENING)):
        say(req, bench.tokenizer, text)
    assert bench.observer.committed(bench.reqs) == []
    if not leaves_lse:
        bench.backend = _Silent(bench.backend)
    query = bench.step()
    track = acting.intentkv.action
    (position,) = track._waiting
    assert position == 40 + len(acting.output_ids) - 1
    torch.testing.assert_close(track._waiting[position][0].double(), bench.exact(2, query), rtol=2e-2, atol=1e-5)
    assert thinking.intentkv.action._waiting == {} and other.intentkv.action is None


class _Silent:
    """A backend that keeps its log-sum-exp to itself, as most do."""

    def __init__(self, backend: CpuAttentionBackend) -> None:
        self.init_forward_metadata, self.forward = backend.init_forward_metadata, backend.forward


def test_nobody_pays_outside_of_a_region() -> None:
    bench = Bench()
    bench.add("other", 20, "intent")
    thinking = bench.add("thinking", 20)
    bench.observer.committed(bench.reqs)
    bench.step(observed=False)
    say(thinking, bench.tokenizer, OPENING)
    bench.observer.committed(bench.reqs)
    bench.step(observed=True)
    say(thinking, bench.tokenizer, ' : "f"}</tool_call>')
    bench.observer.committed(bench.reqs)
    bench.step(observed=False)


def test_a_prefill_is_not_watched_and_a_gone_request_neither() -> None:
    bench = Bench()
    req = bench.add("acting", 20)
    say(req, bench.tokenizer, OPENING)
    bench.observer.committed(bench.reqs)
    batch = with_identity(bench.host.batch([23], [3]), ["acting"])
    assert batch.forward_mode == ForwardMode.EXTEND
    bench.observer.begin(batch)
    assert bench.observer._step is None
    bench.reqs.clear()
    del req
    assert not bench.observer._inside


def test_a_step_that_hid_its_queries_is_told(caplog: pytest.LogCaptureFixture) -> None:
    bench = Bench()
    req = bench.add("acting", 20)
    say(req, bench.tokenizer, OPENING)
    bench.observer.committed(bench.reqs)
    batch = with_identity(bench.host.batch([20 + len(req.output_ids)]), ["acting"])
    bench.observer.begin(batch)  # and no layer passes by, as in a replayed graph
    bench.observer.begin(batch)
    assert "passed 0 of 1 attention layers" in caplog.text


# -- the track: what of the waiting attention counts


def make_track(tokenizer: Tokenizer, prompt: int = 4) -> ActionTrack:
    regions = ActionRegions(make_detector("hermes"), lambda t: tokenizer.decode([t], skip_special_tokens=False))
    return ActionTrack(regions, KeepScores(0.5, 0.9), prompt)


@pytest.mark.parametrize("lag", [0, 1], ids=["normal scheduler", "overlap scheduler"])
def test_the_mean_over_the_region_whichever_scheduler(lag: int) -> None:
    """Every forward recovers the attention of its token where the host knew of a region when it was launched."""
    tokenizer = Tokenizer()
    answer = tokenizer.encode('Look. <tool_call>{"name": "f", "a": 1}</tool_call> Done.')
    opened, closed = (answer.index(tokenizer.encode(text)[0]) for text in ("<tool_call>", "</tool_call>"))
    track, rng = make_track(tokenizer), np.random.default_rng(0)
    counted: list[np.ndarray] = []
    for known in range(len(answer) + 1):
        track.read(answer[:known])
        launched = known + lag  # the forward of this many tokens runs next; its query is the last of them
        if track.inside and launched <= len(answer):
            values = rng.random(4 + launched).astype(np.float32)
            track.recovered(4 + launched - 1, torch.from_numpy(values), np.empty(0, np.int64))
            if opened < launched - 1 < closed:
                counted.append(values)
    assert track.regions == 1 and not track.inside
    assert len(counted) == closed - opened - 1 - lag
    sums = np.zeros(4 + closed, np.float32)
    for values in counted:
        sums[: len(values)] += values
    mean = sums / np.float32(len(counted))
    expected = KeepScores(0.5, 0.9)
    expected.update(mean, np.arange(len(mean)))
    assert np.allclose(track.keep.at(np.arange(30)), expected.at(np.arange(30)))


def test_a_region_begins_anew_after_retraction() -> None:
    tokenizer = Tokenizer()
    track = make_track(tokenizer)
    answer = tokenizer.encode('<tool_call>{"name": "f"}')
    track.read(answer[:-1])
    track.recovered(4 + len(answer) - 2, torch.ones(4 + len(answer) - 1), np.empty(0, np.int64))
    track.forget_region()
    assert track.inside
    track.finish(answer)
    assert track.regions == 1 and track.round_over and not track.keep.values.any()


def test_an_open_region_ends_with_the_answer() -> None:
    tokenizer = Tokenizer()
    track = make_track(tokenizer)
    answer = tokenizer.encode('<tool_call>{"name": "f"')
    track.read(answer[:-1])
    track.recovered(4 + len(answer) - 2, torch.full((4 + len(answer) - 1,), 0.25), np.empty(0, np.int64))
    track.finish(answer)
    assert track.regions == 1 and track.keep.values[:4].tolist() == [0.25] * 4


def test_kv_heads_weigh_alike() -> None:
    """The mean over KV heads, each the most of its group: between the mean and the most of all query heads."""
    bench = Bench()
    req = bench.add("acting", 40)
    say(req, bench.tokenizer, OPENING)
    bench.observer.committed(bench.reqs)
    query = bench.step()
    ((attention, _),) = req.intentkv.action._waiting.values()
    assert H_KV == 3 and 1.0 <= float(attention.sum()) <= H_Q / H_KV
    assert float(bench.exact(0, query).sum()) == pytest.approx(float(attention.sum()), rel=1e-3)
