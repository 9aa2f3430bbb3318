"""A decode step of a pruned request against stock requests of its logical and of its live length, in one process.

    python scripts/bench_decode.py [--json] [--logical 8000 --live 1000 --steps 40 --batch 1]
    python scripts/bench_decode.py --qwen3 28 16 8 --attention-backend fa3     # on a GPU

Times the whole model: SGLang's own ModelRunner, CUDA graphs included where there are any. The KV pool is filled with random
numbers instead of a prefill, which costs a decode step nothing. All three kinds run on one attention backend: "stock" is
that backend reading whole rows, so on a CPU it is faster than SGLang's own torch_native. One step of each kind in turn, so
that what slows the machine slows all three; medians of the ratios of neighbouring steps. Beside them, what a budget of `auto` adds:
the confidence of the tokens of each pruned step, from its logits, over that step.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.console import Console
from rich.table import Table

from intentkv.apply.live_view import LiveViews
from intentkv.engine import live_backends
from intentkv.evals.model import model_path, tiny_checkpoint
from intentkv.observe.confidence import token_confidence

console = Console(stderr=True)


@dataclass
class Requests:
    """A batch of requests of one kind. `rows`: their rows, one after the other; `length`: logical tokens in each."""

    rows: np.ndarray
    length: int
    slots: torch.Tensor  # [B, length + steps]


def start_runner(model: Path, flags: list[str]) -> Any:
    """A ModelRunner with pools, attention backend and graphs, but no scheduler."""
    from sglang.benchmark.one_batch import load_model
    from sglang.srt.runtime_context import SpawnRanks, publish
    from sglang.srt.server_args import PortArgs, prepare_server_args

    live_backends.register()
    server_args = prepare_server_args(["--model-path", str(model), *flags])
    publish(server_args, role="scheduler", ranks=SpawnRanks(world_rank=0, dp_rank=None, gpu_id=0))
    runner, _ = load_model(server_args, PortArgs.init_new(server_args), 0, 0)
    return runner.torch_runner


def fill(runner: Any, views: LiveViews, first_row: int, batch: int, length: int, live: int, steps: int) -> Requests:
    """Give rows of random slots to `batch` requests; where `live` is less than `length`, drop the rest at random."""
    allocator, pool = runner.token_to_kv_pool_allocator, runner.req_to_token_pool
    rows = np.arange(first_row, first_row + batch)
    room = -(-(length + steps) // runner.page_size) * runner.page_size
    slots = allocator.alloc(batch * room).view(batch, room)
    for row, own in zip(rows.tolist(), slots):
        pool.write((row, slice(0, room)), own.int())
        if live < length:
            pages = np.arange(length // runner.page_size - 1)  # the last page is being continued
            gone = np.random.default_rng(row).choice(pages, (length - live) // runner.page_size, replace=False)
            holes = (np.sort(gone)[:, None] * runner.page_size + np.arange(runner.page_size)).ravel()
            views.set_holes(row, holes, length)
            where = torch.from_numpy(holes).to(own.device)
            pool.write((row, where), (where % runner.page_size).int())
    return Requests(rows, length, slots)


def decode(runner: Any, requests: Requests, step: int, ours: bool) -> tuple[float, float]:
    """Milliseconds of one decode step, `step` tokens after the start, and of the confidence of its tokens.

    Live views are shown to the step only if it is `ours`.
    """
    from sglang.srt.model_executor.forward_batch_info import CaptureHiddenMode, ForwardBatch, ForwardMode
    from sglang.srt.speculative.spec_info import SpeculativeAlgorithm

    batch, length = len(requests.rows), requests.length + step + 1
    rows = torch.from_numpy(requests.rows)
    lens = torch.full((batch,), length, dtype=torch.int64, device=runner.device)
    forward_batch = ForwardBatch(
        forward_mode=ForwardMode.DECODE,
        batch_size=batch,
        input_ids=torch.full((batch,), 1 + step, dtype=torch.int64, device=runner.device),
        req_pool_indices=rows.to(runner.device),
        seq_lens=lens,
        seq_lens_cpu=torch.full((batch,), length, dtype=torch.int64),
        seq_lens_sum=batch * length,
        orig_seq_lens=lens.to(torch.int32),
        out_cache_loc=requests.slots[:, length - 1].contiguous(),
        positions=lens - 1,
        capture_hidden_mode=CaptureHiddenMode.NULL,
        spec_algorithm=SpeculativeAlgorithm.NONE,
    )
    runner.kv_index_translator.bind_own_plan(forward_batch)
    views = runner.attn_backend.views
    device = torch.get_device_module(runner.device)
    device.synchronize()
    start = time.perf_counter()
    views.running = requests.rows if ours else None
    logits = runner.forward(forward_batch).logits_output.next_token_logits
    views.running = None
    device.synchronize()
    stepped = time.perf_counter()
    token_confidence(logits)
    device.synchronize()
    return 1e3 * (stepped - start), 1e3 * (time.perf_counter() - stepped)


def measure(runner: Any, arguments: argparse.Namespace) -> tuple[dict[str, list[float]], list[float]]:
    """Milliseconds of every timed step, by kind, and of the confidence of each pruned one's tokens.

    The steps of one index are neighbours in time.
    """
    views = LiveViews(runner.req_to_token_pool.req_to_token)
    live_backends.attach_views(runner.attn_backend, views)
    pool = runner.token_to_kv_pool
    for buffer in (*pool.k_buffer, *pool.v_buffer):
        buffer.normal_()
    warm = 5
    sizes = {
        "stock, logical length": (arguments.logical, arguments.logical),
        "stock, live length": (arguments.live, arguments.live),
        "pruned": (arguments.logical, arguments.live),
    }
    kinds = {
        name: fill(runner, views, 1 + n * arguments.batch, arguments.batch, length, live, warm + arguments.steps)
        for n, (name, (length, live)) in enumerate(sizes.items())
    }
    times: dict[str, list[float]] = {name: [] for name in kinds}
    confidence: list[float] = []
    for step in range(warm + arguments.steps):
        order = list(kinds) if step % 2 else list(kinds)[::-1]
        for name in order:
            milliseconds, after = decode(runner, kinds[name], step, ours=name == "pruned")
            if step >= warm:
                times[name].append(milliseconds)
                confidence += [after] if name == "pruned" else []
    return times, confidence


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--logical", type=int, default=8000, help="tokens of the text (default: %(default)s)")
    parser.add_argument("--live", type=int, default=1000, help="tokens of it that are kept (default: %(default)s)")
    parser.add_argument("--steps", type=int, default=40, help="timed steps of each kind (default: %(default)s)")
    parser.add_argument("--batch", type=int, default=1, help="requests in a step (default: %(default)s)")
    parser.add_argument("--model", type=Path, help="model folder (default: SmolLM2-135M-Instruct)")
    parser.add_argument(
        "--qwen3",
        type=int,
        nargs=3,
        metavar=("LAYERS", "HEADS", "KV_HEADS"),
        help="a random Qwen3-shaped model with head_dim 128 instead",
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object as the last line")
    arguments, flags = parser.parse_known_args()
    if not 0 < arguments.live < arguments.logical or arguments.steps < 10:
        parser.error("expected 0 < --live < --logical and at least 10 --steps")
    room = 3 * arguments.batch * (arguments.logical + arguments.steps + 1024)
    flags = ["--max-total-tokens", str(room), "--max-running-requests", str(3 * arguments.batch), *flags]
    with tempfile.TemporaryDirectory() as folder, torch.inference_mode():
        model = arguments.model or model_path()
        if arguments.qwen3:
            layers, heads, kv_heads = arguments.qwen3
            model = tiny_checkpoint(
                Path(folder), kind="qwen3", layers=layers, heads=heads, kv_heads=kv_heads, head_dim=128
            )
        runner = start_runner(model, flags)
        times, confidence = measure(runner, arguments)
    show(times, confidence, runner, arguments)


def show(times: dict[str, list[float]], confidence: list[float], runner: Any, arguments: argparse.Namespace) -> None:
    long, short, pruned = (np.array(series) for series in times.values())
    share = np.array(confidence) / pruned
    faster, slower = long / pruned, pruned / short
    backend = type(runner.attn_backend).__name__
    table = Table(
        title=f"{backend} on {runner.device}, {arguments.batch} x {arguments.logical} / {arguments.live} tokens"
    )
    for column in ("decode step", "median ms", "25 % .. 75 %"):
        table.add_column(column)
    for name, series in times.items():
        low, middle, high = statistics.quantiles(series, n=4)
        table.add_row(name, f"{middle:.2f}", f"{low:.2f} .. {high:.2f}")
    console.print(table)
    console.print(f"faster than stock at the logical length: {np.median(faster):.2f}x")
    console.print(f"time over stock at the live length:      {np.median(slower):.3f}")
    console.print(
        f"confidence of its tokens, over the step: {np.median(share):.2%}, {statistics.median(confidence):.3f} ms"
    )
    if arguments.json:
        result = {
            "speedup_over_stock_8k": round(float(np.median(faster)), 3),
            "time_over_stock_1k": round(float(np.median(slower)), 4),
            "confidence_over_step": round(float(np.median(share)), 5),
            "confidence_milliseconds": round(statistics.median(confidence), 4),
            "spread_confidence": [round(float(np.percentile(share, p)), 5) for p in (25, 75)],
            "spread_speedup": [round(float(np.percentile(faster, p)), 3) for p in (25, 75)],
            "spread_time": [round(float(np.percentile(slower, p)), 4) for p in (25, 75)],
            "logical": arguments.logical,
            "live": arguments.live,
            "batch": arguments.batch,
            "steps": arguments.steps,
            "backend": backend,
            "device": str(runner.device),
            "milliseconds": {name: round(statistics.median(series), 3) for name, series in times.items()},
        }
        sys.stderr.flush()
        print(json.dumps(result))


if __name__ == "__main__":
    main()
