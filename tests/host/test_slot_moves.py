"""Slots that are moved take everything along: keys and values of every layer, and whatever else is kept by slot."""

from types import SimpleNamespace

import pytest
import torch
from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool

from intentkv.engine import slot_moves
from intentkv.engine.scoring import Scoring
from intentkv.engine.slot_moves import SlotMoves
from intentkv.engine.surprise import SurpriseObserver
from intentkv.observe.attention_mass import AttentionMass
from tests.host.pools import publish_settings

publish_settings()
PAGE, SIZE, LAYERS = 16, 128, 3
SLOTS = SIZE + PAGE
SOURCES, DESTINATIONS = torch.tensor([20, 21, 77, 140]), torch.tensor([35, 36, 100, 19])


class Server:
    """SGLang's own KV pool and our observers, filled with numbers that are all different."""

    def __init__(self) -> None:
        self.pool = MHATokenToKVPool(SIZE, PAGE, torch.float32, 2, 4, LAYERS, "cpu", enable_memory_saver=False)
        device = torch.device("cpu")
        observers = {"surprise": SurpriseObserver(SLOTS, 9, device), "attention": AttentionMass(SLOTS, device)}
        scheduler = SimpleNamespace(
            token_to_kv_pool_allocator=SimpleNamespace(get_kvcache=lambda: self.pool),
            tp_worker=SimpleNamespace(
                model_runner=SimpleNamespace(model_config=SimpleNamespace(num_hidden_layers=LAYERS))
            ),
        )
        scoring = SimpleNamespace(**observers, by_slot=lambda: Scoring.by_slot(scoring))
        self.move = SlotMoves(scheduler, scoring)
        # Not what `by_slot` lists, but all that is there: whatever an observer keeps for every slot of the pool.
        kept = [
            value for part in observers.values() for value in vars(part).values() if isinstance(value, torch.Tensor)
        ]
        self.kept = [tensor for tensor in kept if len(tensor) == SLOTS]
        buffers = (self.pool.get_key_buffer, self.pool.get_value_buffer)
        self.kept += [buffer(layer) for layer in range(LAYERS) for buffer in buffers]
        for number, tensor in enumerate(self.kept):
            tensor.copy_(torch.arange(tensor.numel()).view_as(tensor) + 100_000 * number)

    def unlike_expected(self) -> list[int]:
        """Move, and tell which of the arrays do not have what they should."""
        expected = [tensor.clone() for tensor in self.kept]
        for tensor in expected:
            tensor[DESTINATIONS] = tensor[SOURCES]
        self.move(SOURCES, DESTINATIONS)
        return [i for i, (got, want) in enumerate(zip(self.kept, expected, strict=True)) if not torch.equal(got, want)]


def test_everything_kept_by_slot_moves_and_nothing_else_is_written() -> None:
    server = Server()
    assert len(server.kept) == 2 + 2 * LAYERS
    assert server.unlike_expected() == []


@pytest.mark.parametrize("forgotten", [0, 1])
def test_an_array_that_stays_behind_is_noticed(forgotten: int, monkeypatch: pytest.MonkeyPatch) -> None:
    by_slot = Scoring.by_slot
    monkeypatch.setattr(Scoring, "by_slot", lambda self: [a for i, a in enumerate(by_slot(self)) if i != forgotten])
    assert Server().unlike_expected() == [forgotten]


def test_what_nobody_observes_is_not_there_to_move() -> None:
    assert Scoring.by_slot(SimpleNamespace(surprise=None, attention=None)) == []


def test_on_a_gpu_copies_wait_for_the_step_that_runs_ahead(monkeypatch: pytest.MonkeyPatch) -> None:
    """The order of what is queued; no stream exists here."""
    queued: list[str] = []
    server = Server()
    server.move._scheduler.forward_stream = "the forward stream"
    current = SimpleNamespace(wait_stream=lambda stream: queued.append(f"wait for {stream}"))
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: current)
    monkeypatch.setattr(slot_moves, "copy_slots", lambda *arguments: queued.append("copy"))
    monkeypatch.setattr(Scoring, "by_slot", lambda self: [])
    server.move(*(SimpleNamespace(is_cuda=True, device="cuda") for _ in range(2)))
    assert queued == ["wait for the forward stream", *["copy"] * LAYERS]
