"""Whose tokens are measured: over chunks, samples and retractions; and that nothing of a slot's earlier owner is left."""

from __future__ import annotations

import itertools
from types import SimpleNamespace

import pytest
import torch
from sglang.srt.model_executor.forward_batch_info import ForwardMode
from sglang.srt.model_executor.model_runner import ModelRunnerOutput

from intentkv.engine import observer, requests, runtime
from intentkv.engine.sampling import SamplingObservers
from intentkv.engine.state import RequestState
from intentkv.engine.surprise import Shard, SurpriseObserver, lm_head_problem
from intentkv.kernels.surprise import token_surprise
from tests.host.test_observer import batch, idle, state_with

E, V, S, ROWS = 8, 40, 300, 9


def asking(prompt: int) -> RequestState:
    state = state_with((prompt - 10, prompt), prompt, "surprise")
    state.prompt = torch.randint(V, (prompt,), generator=torch.Generator().manual_seed(prompt)).numpy()
    state.goal, state.look = prompt, 1 << 30
    return state


class Server:
    """Forwards through both hooks and the sampling observer, over a model that is a table of hidden states by token.

    A request's KV lies at its positions, behind those of the rows before it, so that `surprise_of` can read them back.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch, **states: RequestState) -> None:
        self.surprise = SurpriseObserver(S, ROWS, torch.device("cpu"))
        self.surprise.by_slot.fill_(99.0)  # left by earlier owners
        draw = torch.Generator().manual_seed(1)
        self.table, self.head = torch.randn(V, E, generator=draw), torch.randn(V, E, generator=draw)
        self.texts = {rid: list(state.prompt) for rid, state in states.items()}
        self.rows = {rid: row for row, rid in enumerate(states, start=1)}
        active = SimpleNamespace(
            scoring=SimpleNamespace(surprise=self.surprise, attention=None),
            views=SimpleNamespace(running=None),
            states=states,
            running_plan=None,
            look=lambda *request: None,
            **idle(),
        )
        self.samplers = SamplingObservers(self.surprise)
        monkeypatch.setattr(runtime, "_runtime", active)

    def slots(self, rid: str, begin: int, end: int) -> torch.Tensor:
        return torch.arange(begin, end) + 100 * (self.rows[rid] - 1)

    def forward(self, *requests: tuple[str, int, int], decode: bool = False) -> None:
        """Compute `[begin, end)` of each request, then sample a token for all of them, as SGLang does even for chunks."""
        spans = [(rid, begin, end - begin) for rid, begin, end in requests]
        made = batch(*spans, mode=ForwardMode.DECODE if decode else ForwardMode.EXTEND)
        made.intentkv_rows = torch.tensor([self.rows[rid] for rid, _, _ in requests])
        made.out_cache_loc = torch.cat([self.slots(*request) for request in requests]).int()
        ids = torch.tensor([t for rid, begin, end in requests for t in self.texts[rid][begin:end]])

        def model(runner: object, same: SimpleNamespace) -> ModelRunnerOutput:
            head, processor = SimpleNamespace(weight=self.head), SimpleNamespace(logit_scale=None)
            # Behind a prefill CUDA graph, rows of padding follow those of the requests.
            padded_ids = torch.cat((ids, ids[:3] * 0))
            padded = SimpleNamespace(
                **vars(same) | {"out_cache_loc": torch.cat((same.out_cache_loc, ids[:3].int() * 0))}
            )
            observer.observe_hidden_states(processor, padded_ids, self.table[padded_ids], head, padded)
            return ModelRunnerOutput(logits_output=None, can_run_graph=False)

        observer.observe_forward(model, None, made)
        last = [self.texts[rid][end - 1] for rid, _, end in requests]
        logits = self.table[last] @ self.head.T
        sampled = logits.argsort(-1)[:, -3]  # not what greedy decoding would take
        if self.samplers.is_active(None):
            state = self.samplers.before_grammar(logits, None)
            logits.fill_(torch.nan)  # as the sampler does, in its way
            assert self.samplers.after_sample(state, sampled) is None
        for (rid, _, end), token in zip(requests, sampled.tolist(), strict=True):
            if end == len(self.texts[rid]):
                self.texts[rid].append(token)

    def expected(self, rid: str, end: int) -> torch.Tensor:
        """Of positions [1, end), all at once."""
        ids = torch.tensor(self.texts[rid][:end])
        return token_surprise(self.table[ids[:-1]], ids[1:], self.head)

    def surprise_of(self, rid: str, begin: int, end: int) -> torch.Tensor:
        return self.surprise.by_slot[self.slots(rid, begin, end)]


@pytest.mark.parametrize("cuts", [[40], [1, 40], [13, 14, 40], list(range(1, 41))])
def test_every_token_is_measured_however_it_was_chunked_and_generated(
    cuts: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A prompt of 40 tokens in chunks, then 5 generated ones, beside a request that opted out."""
    server = Server(monkeypatch, other=state_with((10, 20), 100), mine=asking(40))
    del runtime.current().states["other"]
    for begin, end in itertools.pairwise([0, *cuts]):
        server.forward(("other", begin, end), ("mine", begin, end))
    for end in range(41, 46):
        server.forward(("other", end - 1, end), ("mine", end - 1, end), decode=True)
    torch.testing.assert_close(server.surprise_of("mine", 1, 45), server.expected("mine", 45), rtol=1e-5, atol=1e-5)
    assert server.surprise_of("mine", 0, 1).item() == 0
    assert server.surprise_of("other", 0, 45).tolist() == [0.0] * 45
    assert (server.surprise.by_slot[[*range(45, 100), *range(145, S)]] == 99.0).all()


def test_isolation_from_the_scorers_of_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """A session whose scorer needs no surprise leaves it with the KV that it shares, all the same."""
    other = asking(40)
    other.needs = frozenset()
    server = Server(monkeypatch, other=other)
    server.forward(("other", 0, 24))
    server.forward(("other", 24, 40))
    for end in range(41, 44):
        server.forward(("other", end - 1, end), decode=True)
    torch.testing.assert_close(server.surprise_of("other", 1, 43), server.expected("other", 43), rtol=1e-5, atol=1e-5)


def test_the_first_token_behind_a_found_prefix_stays_unknown(monkeypatch: pytest.MonkeyPatch) -> None:
    server = Server(monkeypatch, mine=asking(40))
    server.forward(("mine", 30, 40))
    assert server.surprise_of("mine", 30, 31).item() == 0
    torch.testing.assert_close(server.surprise_of("mine", 31, 40), server.expected("mine", 40)[30:])


@pytest.mark.parametrize("found", [0, 16, 40, 44, 45])
@pytest.mark.parametrize("launched", [45, 46])
def test_after_a_retraction_the_same_is_known(found: int, launched: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Computed again from wherever it is found, in other chunks: every number is the one it had, bit for bit. With a step
    `launched` ahead, whose token is thrown away, too."""
    state = asking(40)
    server = Server(monkeypatch, mine=state)
    server.forward(("mine", 0, 40))
    for end in range(41, launched + 1):
        server.forward(("mine", end - 1, end), decode=True)
    sampled = server.surprise._ahead[server.rows["mine"]].item()
    before = [*server.surprise_of("mine", 0, launched).tolist(), sampled][:46]
    server.surprise.keep(state, server.slots("mine", 0, launched), server.rows["mine"])
    requests.take_back_event(None, SimpleNamespace(intentkv=state))
    server.texts["mine"] = server.texts["mine"][:46]
    state.goal = 46
    server.surprise.by_slot[server.slots("mine", found, 46)] = 99.0
    for begin, end in itertools.pairwise(sorted({found, 42, 46} - set(range(found)))):
        server.forward(("mine", begin, end))
    assert server.surprise_of("mine", 0, 46).tolist() == before
    server.forward(("mine", 46, 47), decode=True)
    torch.testing.assert_close(
        server.surprise_of("mine", 46, 47), server.expected("mine", 47)[45:], rtol=1e-5, atol=1e-5
    )


def test_everything_stays_on_the_device_of_the_pool() -> None:
    """Prefill, sample, decode, retraction and prefill again on a device that takes no tensor of another, as a GPU does."""
    device = torch.device("meta")
    surprise = SurpriseObserver(S, ROWS, device)
    state, head = asking(40), Shard(torch.zeros(V, E, device=device), 0)

    def forward(begin: int, end: int, mode: ForwardMode) -> torch.Tensor:
        made = batch(("mine", begin, end - begin), mode=mode)
        made.intentkv_rows, made.out_cache_loc = (
            torch.tensor([1]),
            torch.zeros(end - begin, dtype=torch.int32, device=device),
        )
        surprise.begin(made, {"mine": state}, observer.computed(made))
        if mode == ForwardMode.EXTEND:
            tokens = torch.zeros(end - begin, dtype=torch.int64, device=device)
            surprise.observe(torch.zeros(end - begin, E, device=device), tokens, made.out_cache_loc, head, 1.0)
        sampled = surprise.before_grammar(torch.zeros(1, V, device=device), None)
        surprise.after_sample(sampled, torch.zeros(1, dtype=torch.int32, device=device))
        return made.out_cache_loc

    forward(0, 40, ForwardMode.EXTEND)
    forward(40, 41, ForwardMode.DECODE)
    for goal in (42, 43):
        surprise.keep(state, torch.zeros(goal - 1, dtype=torch.int32, device=device), 1)
        requests.take_back_event(None, SimpleNamespace(intentkv=state))
        state.goal = goal
        forward(16, goal, ForwardMode.EXTEND)
    assert state.measured is not None and state.measured.device == device and len(state.measured) == 43


@pytest.mark.parametrize(
    ("model", "found"),
    [
        (SimpleNamespace(), "none"),
        (SimpleNamespace(lm_head=SimpleNamespace(weight=torch.zeros(2, 2, dtype=torch.int8))), "torch.int8"),
    ],
)
def test_a_model_without_a_usable_head_is_named(model: SimpleNamespace, found: str) -> None:
    problem = lm_head_problem(model)
    assert problem is not None and found in problem and "--intentkv-scorer" in problem


def test_a_plain_head_is_fine() -> None:
    assert lm_head_problem(SimpleNamespace(lm_head=torch.nn.Linear(2, 2))) is None
