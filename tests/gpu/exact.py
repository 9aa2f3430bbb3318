"""One attention backend over pruned rows, logits against float64: `python -m tests.gpu.exact --model M [--probe] <flags>`.

SGLang's own ModelRunner with its pools, its graphs and intentkv's backends, without a scheduler: three requests are
computed, tokens of two of them are dropped, and all go on by another extend and by decode steps. The last line printed is
one JSON object. A process of its own for every backend, because SGLang has one set of settings a process.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from sglang.benchmark import one_batch
from sglang.srt.plugins import load_plugins
from sglang.srt.runtime_context import SpawnRanks, publish
from sglang.srt.server_args import PortArgs, prepare_server_args
from torch import Tensor

from intentkv.apply.live_view import LiveViews
from intentkv.engine import live_backends
from tests.gpu.reference import Reference

BEFORE, THEN, STEPS = (150, 90, 201), (20, 7, 33), 6  # tokens before the drop, in the extend after it, decode steps
PRUNED, BESIDE = (0, 2), (1,)  # requests that lose tokens, and one in the same batches that does not
SCORER = "snapkv"  # one that looks at decode steps, so that graphs keep their queries


@dataclass
class Seen:
    """What the backend computed: logits `[3, V]` of every forward behind the drop, and queries `[L, 3, H_q, D]` of every
    decode step that a graph replayed."""

    logits: list[Tensor]
    queries: list[Tensor]


def start_runner(model: Path, flags: list[str], intentkv: bool) -> Any:
    """A ModelRunner with pools, attention backend and graphs, but no scheduler; without `intentkv`, SGLang's own."""
    load_plugins()
    ours = ["--enable-intentkv", "--intentkv-scorer", SCORER] if intentkv else []
    server_args = prepare_server_args(["--model-path", str(model), *flags, *ours])
    publish(server_args, role="scheduler", ranks=SpawnRanks(world_rank=0, dp_rank=None, gpu_id=0))
    runner, _ = one_batch.load_model(server_args, PortArgs.init_new(server_args), 0, 0)
    return runner.torch_runner


def draw_texts(vocabulary: int) -> list[Tensor]:
    """The token ids of every request, `[n]` int64: prompt, second part and the tokens of the decode steps."""
    draw = np.random.default_rng(0)
    return [torch.from_numpy(draw.integers(0, vocabulary, b + t + STEPS)) for b, t in zip(BEFORE, THEN, strict=True)]


def draw_holes(page_size: int) -> list[np.ndarray]:
    """Dropped positions of every request, `[h]` int64: half of the whole pages behind the first, for two of the three."""
    holes = []
    for number, length in enumerate(BEFORE):
        pages = np.arange(1, length // page_size)
        gone = np.sort(np.random.default_rng(number).choice(pages, len(pages) // 2, replace=False))
        every = (gone[:, None] * page_size + np.arange(page_size)).ravel()
        holes.append(every if number in PRUNED else np.empty(0, np.int64))
    return holes


def compute(runner: Any, views: LiveViews, texts: list[Tensor], holes: list[np.ndarray]) -> Seen:
    """Run the requests through SGLang; `holes` become tombstones in their rows and live views after the first part."""
    prompts = [text[:n].tolist() for text, n in zip(texts, BEFORE, strict=True)]
    reqs = one_batch.prepare_synthetic_inputs_for_latency_test(len(texts), 0, prompts)
    one_batch.extend(reqs, runner)
    rows = np.array([req.kv.req_pool_idx for req in reqs])
    for row, gone, length in zip(rows.tolist(), holes, BEFORE, strict=True):
        drop(runner, views, row, gone, length)
    views.running = rows
    for req, text, start, count in zip(reqs, texts, BEFORE, THEN, strict=True):
        req.full_untruncated_fill_ids.extend(text[start : start + count].tolist())
        req.prefix_len, req.logprob_start_len, req.extend_end = start, -1, start + count
    _, logits, batch = one_batch.extend(reqs, runner)
    seen = Seen([logits.double().cpu()], [])
    for step in range(STEPS):
        tokens = torch.stack([text[step - STEPS] for text in texts]).to(runner.device)
        _, logits = one_batch.decode(tokens, batch, runner)
        seen.logits.append(logits.double().cpu())
        if runner.decode_cuda_graph_runner not in (None, runner.eager_runner):
            kept = live_backends.decode_part(runner.attn_backend).graph_queries
            seen.queries.append(torch.stack([rows.double().cpu() for _, rows in kept.replayed(len(texts))]))
    views.running = None
    return seen


def drop(runner: Any, views: LiveViews, row: int, holes: np.ndarray, length: int) -> None:
    """Tombstones as the cache writes them, and page 0 full of what would show in every logit if it were read."""
    size = runner.page_size
    views.set_holes(row, holes, length)
    where = torch.from_numpy(holes).to(runner.device)
    runner.req_to_token_pool.write((row, where), (where % size).int())
    for buffer in (*runner.token_to_kv_pool.k_buffer, *runner.token_to_kv_pool.v_buffer):
        buffer[:size].normal_(std=8)


def expected(model: Reference, texts: list[Tensor], holes: list[np.ndarray]) -> Seen:
    """What `compute` should give, in float64."""
    logits, queries = [], []
    for text, gone, length in zip(texts, holes, BEFORE, strict=True):
        hidden = torch.zeros(len(text), len(text), dtype=torch.bool)
        hidden[length:, torch.from_numpy(gone)] = True
        made, rotated = model(text, hidden)
        logits.append(made[-STEPS - 1 :])
        queries.append(rotated[:, -STEPS:])
    return Seen(list(torch.stack(logits, 1)), list(torch.stack(queries, 2).unbind(1)))


def measure(runner: Any, model: Path) -> dict[str, Any]:
    """Root mean squares, over the requests that lose tokens and over the one beside them: our error, the backend's own where
    nothing is dropped, both against float64, and what the drop changes at all."""
    views = LiveViews(runner.req_to_token_pool.req_to_token)
    live_backends.attach_views(runner.attn_backend, views)
    texts, holes = draw_texts(runner.model_config.vocab_size), draw_holes(runner.page_size)
    nothing = [gone[:0] for gone in holes]
    pruned, whole = (compute(runner, views, texts, each) for each in (holes, nothing))
    reference = Reference(model)
    exact, exact_whole = (expected(reference, texts, each) for each in (holes, nothing))
    figures = {}
    for name, forwards in {"extend": slice(0, 1), "decode": slice(1, None)}.items():
        for kind, lanes in {"pruned": PRUNED, "beside": BESIDE}.items():
            figures[f"{name}, {kind}"] = {
                "error": rms(pruned.logits[forwards], exact.logits[forwards], lanes),
                "own_error": rms(whole.logits[forwards], exact_whole.logits[forwards], lanes),
                "effect": rms(exact.logits[forwards], exact_whole.logits[forwards], lanes),
            }
    if pruned.queries:
        figures["queries, pruned"] = {
            "error": rms(pruned.queries, exact.queries, PRUNED),
            "own_error": rms(whole.queries, exact_whole.queries, PRUNED),
            "effect": rms(exact.queries, exact_whole.queries, PRUNED),
        }
    return {"replayed": len(pruned.queries), "figures": figures}


def rms(a: list[Tensor], b: list[Tensor], lanes: tuple[int, ...]) -> float:
    """Of the differences in some requests; tensors are `[3, V]`, or `[L, 3, H_q, D]`."""
    parts = [(x - y).index_select(x.dim() // 4, torch.tensor(lanes)) for x, y in zip(a, b, strict=True)]
    return float(torch.cat([part.flatten() for part in parts]).square().mean().sqrt())


def main(prepare: Callable[[Any], None] = lambda runner: None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, required=True, help="folder of a Qwen3 checkpoint")
    parser.add_argument("--probe", action="store_true", help="only see whether SGLang alone starts with these flags")
    arguments, flags = parser.parse_known_args()
    with torch.inference_mode():
        runner = start_runner(arguments.model, flags, intentkv=not arguments.probe)
        if arguments.probe:
            print(json.dumps({"backend": type(runner.attn_backend).__name__}))
            return
        prepare(runner)
        result = measure(runner, arguments.model)
    made = {"backend": type(runner.attn_backend).__name__, "device": str(runner.device), "page_size": runner.page_size}
    print(json.dumps({**made, **result}))


if __name__ == "__main__":
    main()
