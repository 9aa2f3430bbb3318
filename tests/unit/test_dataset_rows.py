"""Training rows: hooks against a plain forward, features against serving, masks, and shards that come back whole."""

import copy
import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from intentkv.evals.model import tiny_checkpoint
from intentkv.observe.spans import find_spans
from intentkv.score.base import ScoreInput
from intentkv.score.head.features import residual
from intentkv.score.head.model import ResidualHead
from intentkv.score.rule import RuleScorer
from intentkv.train.capture import CaptureModel
from intentkv.train.dataset import INDEX, FeatureSet, ShardWriter
from intentkv.train.examples import ExampleMaker, TraceRows
from intentkv.train.generate import make_trace
from intentkv.train.render import Rendered, Renderer
from intentkv.train.traces import parse_trace
from intentkv.train.worlds import HARBOUR

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(scope="module", params=["llama", "qwen3"])
def checkpoint(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_checkpoint(tmp_path_factory.mktemp("model"), kind=request.param)


@pytest.fixture(scope="module")
def made(checkpoint: Path) -> tuple[CaptureModel, Renderer, Rendered, ExampleMaker, TraceRows]:
    from transformers import AutoTokenizer

    model, renderer = CaptureModel(checkpoint), Renderer(AutoTokenizer.from_pretrained(checkpoint))
    rendered = renderer.render(parse_trace(make_trace(HARBOUR, 1, records=2, filler=2, errands=3)))
    maker = ExampleMaker(model, renderer)
    return model, renderer, rendered, maker, maker.make(rendered)


def plain_attention_inputs(path: Path, ids: torch.Tensor) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Layer -> rotated queries `[N, H_q, D]` and keys `[N, H_kv, D]`, by hand from each layer's hidden states, in float64."""
    from transformers import AutoModel

    model = AutoModel.from_pretrained(path, dtype=torch.float64, attn_implementation="eager").eval()
    with torch.inference_mode():
        states = model(ids.unsqueeze(0), output_hidden_states=True, use_cache=False).hidden_states
    theta, dim = model.config.rope_parameters["rope_theta"], model.config.head_dim
    angles = torch.arange(len(ids)).double()[:, None] / theta ** (torch.arange(0, dim, 2).double() / dim)
    cos, sin = torch.cat([angles.cos()] * 2, -1)[:, None], torch.cat([angles.sin()] * 2, -1)[:, None]
    found = []
    for layer, state in zip(model.layers, states, strict=False):
        attention, x = layer.self_attn, layer.input_layernorm(state[0])
        rotated = []
        for project, norm in ((attention.q_proj, "q_norm"), (attention.k_proj, "k_norm")):
            heads = project(x).unflatten(-1, (-1, dim))
            heads = getattr(attention, norm)(heads) if hasattr(attention, norm) else heads
            first, second = heads.chunk(2, -1)
            rotated.append((heads * cos + torch.cat([-second, first], -1) * sin).detach())
        found.append((rotated[0], rotated[1]))
    return found


def test_captured_queries_and_keys_are_those_of_a_plain_forward(checkpoint: Path) -> None:
    ids = torch.arange(40) * 37 % 1000
    captured = CaptureModel(checkpoint).forward(ids, [(5, 12), (30, 40)])
    plain = plain_attention_inputs(checkpoint, ids)
    assert len(captured.keys) == len(plain) == 2
    for layer, (queries, keys) in enumerate(plain):
        assert captured.keys[layer].dtype == torch.bfloat16
        assert torch.allclose(captured.keys[layer].double(), keys, rtol=2**-8, atol=1e-4)
        for (start, end), mean in zip(captured.spans, captured.queries, strict=True):
            assert torch.allclose(mean.mean()[layer].double(), queries[start:end].mean(0), rtol=1e-4, atol=1e-4)


def test_rule_scores_of_captured_tensors_equal_a_plain_computation(checkpoint: Path, made: Any) -> None:
    """The whole way of the first turn's row: span, memory, keys and softmax, by hand from the plain forward."""
    _, renderer, rendered, _, trace = made
    turn, row = rendered.turns[1], trace.rows[0]
    plain = plain_attention_inputs(checkpoint, torch.from_numpy(rendered.ids))
    spans = [find_spans(rendered.ids[: t.tokens], renderer.format).query for t in rendered.turns[:2]]
    total = torch.zeros(len(row.positions), dtype=torch.float64)
    for queries, keys in plain:
        memory: torch.Tensor = torch.zeros(1)
        for start, end in spans:
            memory = torch.nn.functional.normalize(math.exp(-0.5) * memory + queries[start:end].mean(0), dim=-1)
        for head in range(4):
            logits = keys[row.positions, head // 2] @ memory[head] / math.sqrt(32)
            total += torch.softmax(logits, 0)
    assert row.positions.max() < spans[1][0] < turn.tokens
    assert torch.allclose(row.rule.double(), total, rtol=2e-2)
    # The differences between tokens, which are what ranks them, agree far below their size.
    assert (row.rule.double() - total).abs().max() < 0.02 * total.std()


def test_training_features_give_the_very_scores_of_serving(made: Any) -> None:
    """The head on a stored row, against the serving code on the paged keys of the same tokens."""
    model, _, rendered, _, trace = made
    torch.manual_seed(0)
    head = ResidualHead(32)
    torch.nn.init.normal_(head.output.weight)
    captured = model.forward(torch.from_numpy(rendered.ids), [])
    row = trace.rows[-1]
    pool = [torch.cat([torch.full_like(k[:5], 9), k]) for k in captured.keys]  # slots are positions + 5
    x = ScoreInput(
        layer_keys=pool.__getitem__,
        slots=row.positions + 5,
        positions=row.positions,
        share=0.25,
        segments=torch.zeros_like(row.positions),
        memory=row.memory.expand(2, 4, 32),
        query=row.memory.expand(2, 4, 32),
        seed=0,
        num_layers=2,
        query_slots=row.span + 5,
    )
    stored = head(trace.keys[row.positions], row.memory, row.rule, trace.keys[row.span])
    assert torch.allclose(stored, residual(head, x, row.rule), rtol=1e-4, atol=1e-5)


def test_query_and_template_tokens_are_masked_and_positives_are_evidence(made: Any) -> None:
    _, _, rendered, maker, trace = made
    assert maker.tally.rows == len(trace.rows) > 2
    assert maker.tally.rows + maker.tally.without_history + maker.tally.without_positive == len(rendered.turns)
    for row in trace.rows:
        assert row.positive.any()
        assert not (row.positive & ~row.counted).any()
        assert not set(row.positions.tolist()) & set(row.span.tolist())
        assert row.memory_error < 1e-10
        text = [rendered.text[slice(*rendered.offsets[p])] for p in row.positions[~row.counted].tolist()]
        assert "<|im_end|>" in text
        assert "<|im_start|>" not in [
            rendered.text[slice(*rendered.offsets[p])] for p in row.positions[row.counted].tolist()
        ]
    by_end = {int(row.span.max()) + 1: row for row in trace.rows}
    acting = [turn for turn in rendered.turns if turn.calls and turn.calls[0].name == HARBOUR.act]
    assert acting
    for turn in acting:
        needed, row = json.loads(turn.calls[0].arguments)["value"], by_end[turn.tokens]
        told = rendered.text[: rendered.offsets[row.span[0]][0]]
        positive = "".join(rendered.text[slice(*rendered.offsets[p])] for p in row.positions[row.positive].tolist())
        assert (needed in positive) == (needed in told)


def test_labels_look_five_calls_ahead_and_not_six(made: Any) -> None:
    """A value told at the start and used in the sixth call from here is a negative, and a call later a positive."""
    model, renderer, *_ = made
    messages = [
        {"role": "system", "content": "s"},
        {"role": "user", "content": "The code is ZEBRA, and value 3. " + "Go on. " * 40},
    ]
    for argument in ("none", *(f"value {i}" for i in range(5)), "ZEBRA"):
        call = {"function": {"name": "f", "arguments": json.dumps({"x": argument})}}
        messages += [
            {"role": "assistant", "content": "", "tool_calls": [call]},
            {"role": "tool", "content": "Nothing to say. " * 40},
        ]
    rendered = renderer.render(parse_trace({"messages": messages}))
    rows = ExampleMaker(model, renderer).make(rendered).rows
    start = rendered.text.index("ZEBRA")
    zebra = set(np.flatnonzero((rendered.offsets[:, 0] < start + 5) & (rendered.offsets[:, 1] > start)).tolist())
    by_end = sorted((max(row.span.tolist()), zebra <= set(row.positions[row.positive].tolist())) for row in rows)
    # Turn 0 has no history; in turn 1 the sixth call from here says ZEBRA, in turns 2 to 6 one of the next five does.
    assert [positive for _, positive in by_end] == [False, True, True, True, True, True]


@pytest.fixture
def shards(tmp_path: Path, made: Any) -> Path:
    model, _, _, _, trace = made
    writer = ShardWriter(tmp_path / "features", model.identity)
    for _ in range(17):
        writer.add(copy.deepcopy(trace))  # one file holds no tensor twice
    writer.add(TraceRows(trace.keys, []))
    writer.close("python build.py", {"rows": 17 * len(trace.rows)})
    return tmp_path / "features"


def test_shards_come_back_whole(shards: Path, made: Any) -> None:
    model, _, _, _, trace = made
    data = FeatureSet(shards)
    assert len(data) == 17 * len(trace.rows)
    assert data.identity == model.identity
    assert sorted(set(data.trace_of)) == list(range(17))
    assert len(list(shards.glob("*.safetensors"))) == 2
    for i in (1, len(data) - len(trace.rows) + 1):
        example, row = data[i], trace.rows[1]
        assert torch.equal(example.keys, trace.keys[row.positions])
        assert torch.equal(example.span_keys, trace.keys[row.span])
        for name in ("positions", "rule", "rescaled", "memory", "span", "positive", "counted"):
            assert torch.equal(getattr(example.row, name), getattr(row, name)), name
        assert example.row.memory_error == row.memory_error


def test_a_damaged_set_is_refused_with_every_shard(shards: Path) -> None:
    first, second = sorted(shards.glob("*.safetensors"))
    first.write_bytes(first.read_bytes()[:-1])
    second.unlink()
    with pytest.raises(ValueError, match="expected a whole shard") as caught:
        FeatureSet(shards)
    assert [str(first) in line or str(second) in line for line in str(caught.value).splitlines()] == [True, True]
    index = json.loads((shards / INDEX).read_text())
    (shards / INDEX).write_text(json.dumps({**index, "version": 2}))
    with pytest.raises(ValueError, match=r"'intentkv-features', 1\), got \('intentkv-features', 2"):
        FeatureSet(shards)
    with pytest.raises(ValueError, match="cannot read it"):
        FeatureSet(shards.parent)


def test_runs_do_not_mix_and_nothing_is_no_data_set(shards: Path, made: Any, tmp_path: Path) -> None:
    with pytest.raises(FileExistsError, match="expected a new or an empty folder"):
        ShardWriter(shards, made[0].identity)
    with pytest.raises(ValueError, match="expected at least one row, got none"):
        ShardWriter(tmp_path / "empty", made[0].identity).close("x", {})


def test_candidates_are_what_a_server_could_drop(made: Any) -> None:
    _, renderer, rendered, _, trace = made
    turns = [turn for turn in rendered.turns if turn.tokens > trace.rows[-1].positions.max()]
    spans = find_spans(rendered.ids[: turns[0].tokens], renderer.format)
    positions = trace.rows[-1].positions.numpy()
    assert positions.min() == spans.system_end
    assert positions.max() < turns[-1].tokens - 64
    assert np.array_equal(positions, np.unique(positions))


def test_rule_scores_are_those_of_the_published_rule(made: Any) -> None:
    row = made[4].rows[0]
    assert row.rule.sum().item() == pytest.approx(2 * 4, rel=1e-4)
    assert row.rescaled.sum().item() == pytest.approx(2 * 4, rel=1e-4)
    assert row.rescaled.max() > row.rule.max()
    assert RuleScorer("intent-rule", 1.0).name == "intent-rule"
