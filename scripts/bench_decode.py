"""A decode step of a pruned request against stock requests of its logical and of its live length, in one process.

    python scripts/bench_decode.py [--json] [--logical 8000 --live 1000 --steps 40 --batch 1 8]
    python scripts/bench_decode.py --qwen3 28 16 8 --attention-backend fa3     # on a GPU

Times the whole model: SGLang's own ModelRunner, CUDA graphs included where there are any. The KV pool is filled with random
numbers instead of a prefill, which costs a decode step nothing. "Stock" is the same attention backend reading whole rows. On
a CPU that is ours, which is faster than the one that SGLang has there, so the step on SGLang's own, `torch_native`, is beside it. One
step of each kind in turn, so that what slows the machine slows all; medians of the ratios of neighbouring steps. Beside
them, what a budget of `auto` adds: the confidence of the tokens of each pruned step, from its logits, over that step.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.console import Console
from rich.table import Table
from sglang.srt.layers.attention.torch_native_backend import TorchNativeAttnBackend

from intentkv.apply.live_view import LiveViews
from intentkv.engine import live_backends
from intentkv.evals.model import model_path, tiny_checkpoint
from intentkv.observe.confidence import token_confidence

console = Console(stderr=True)


LOGICAL, LIVE, PRUNED, NATIVE = "stock, logical length", "stock, live length", "pruned", "torch_native, logical length"


@dataclass
class Requests:
    """A batch of requests of one kind. `rows`: their rows, one after the other; `length`: logical tokens in each."""

    rows: np.ndarray
    length: int
    slots: torch.Tensor  # [B, length + steps]
    backend: Any  # that computes their attention


@dataclass
class Times:
    """Milliseconds of every timed step, by kind, and of the confidence of each pruned one's tokens.

    The steps of one index are neighbours in time.
    """

    steps: dict[str, list[float]]
    confidence: list[float]

    def over(self, kind: str) -> np.ndarray:
        """`[steps]`, how many times longer a step of `kind` took than the pruned one beside it."""
        return np.array(self.steps[kind]) / np.array(self.steps[PRUNED])

    def confidence_share(self) -> np.ndarray:
        """`[steps]`, the confidence of a pruned step's tokens over that step."""
        return np.array(self.confidence) / np.array(self.steps[PRUNED])


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
    return Requests(rows, length, slots, runner.attn_backend)


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
    own = runner.attn_backend
    device = torch.get_device_module(runner.device)
    device.synchronize()
    start = time.perf_counter()
    runner.attn_backend, own.views.running = requests.backend, requests.rows if ours else None
    logits = runner.forward(forward_batch).logits_output.next_token_logits
    runner.attn_backend, own.views.running = own, None
    device.synchronize()
    stepped = time.perf_counter()
    token_confidence(logits)
    device.synchronize()
    return 1e3 * (stepped - start), 1e3 * (time.perf_counter() - stepped)


def measure(runner: Any, arguments: argparse.Namespace, batch: int) -> Times:
    """Steps of `batch` requests of each kind; what they held in the pool is free again afterwards."""
    views = LiveViews(runner.req_to_token_pool.req_to_token)
    live_backends.attach_views(runner.attn_backend, views)
    warm = 5
    sizes = {
        LOGICAL: (arguments.logical, arguments.logical),
        LIVE: (arguments.live, arguments.live),
        PRUNED: (arguments.logical, arguments.live),
    }
    kinds = {
        name: fill(runner, views, 1 + n * batch, batch, length, live, warm + arguments.steps)
        for n, (name, (length, live)) in enumerate(sizes.items())
    }
    if runner.device == "cpu":
        kinds[NATIVE] = replace(kinds[LOGICAL], backend=TorchNativeAttnBackend(runner))
    times = Times({name: [] for name in kinds}, [])
    for step in range(warm + arguments.steps):
        order = list(kinds) if step % 2 else list(kinds)[::-1]
        for name in order:
            milliseconds, after = decode(runner, kinds[name], step, ours=name == PRUNED)
            if step >= warm:
                times.steps[name].append(milliseconds)
                times.confidence += [after] if name == PRUNED else []
    runner.token_to_kv_pool_allocator.clear()
    return times


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--logical", type=int, default=8000, help="tokens of the text (default: %(default)s)")
    parser.add_argument("--live", type=int, default=1000, help="tokens of it that are kept (default: %(default)s)")
    parser.add_argument("--steps", type=int, default=40, help="timed steps of each kind (default: %(default)s)")
    parser.add_argument(
        "--batch", type=int, nargs="+", default=[1, 8], help="requests in a step, one or more (default: 1 and 8)"
    )
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
    if not 0 < arguments.live < arguments.logical or arguments.steps < 10 or min(arguments.batch) < 1:
        parser.error("expected 0 < --live < --logical, at least 10 --steps and at least 1 in a --batch")
    rows = 3 * max(arguments.batch)
    room = rows * (arguments.logical + arguments.steps + 1024)
    flags = ["--max-total-tokens", str(room), "--max-running-requests", str(rows), *flags]
    with tempfile.TemporaryDirectory() as folder, torch.inference_mode():
        model = arguments.model or model_path()
        if arguments.qwen3:
            layers, heads, kv_heads = arguments.qwen3
            model = tiny_checkpoint(
                Path(folder), kind="qwen3", layers=layers, heads=heads, kv_heads=kv_heads, head_dim=128
            )
        runner = start_runner(model, flags)
        pool = runner.token_to_kv_pool
        for buffer in (*pool.k_buffer, *pool.v_buffer):
            buffer.normal_()
        measured = {batch: measure(runner, arguments, batch) for batch in arguments.batch}
    for batch, times in measured.items():
        show(times, f"{describe(runner)}, {batch} x {arguments.logical} / {arguments.live} tokens")
    if arguments.json:
        result = {
            "by_batch": {str(batch): figures(times) for batch, times in measured.items()},
            **{name: getattr(arguments, name) for name in ("logical", "live", "steps")},
            "backend": describe(runner),
        }
        sys.stderr.flush()
        print(json.dumps(result))


def describe(runner: Any) -> str:
    return f"{type(runner.attn_backend).__name__} on {runner.device}"


def show(times: Times, title: str) -> None:
    table = Table(title=title)
    for column in ("decode step", "median ms", "25 % .. 75 %", "over pruned"):
        table.add_column(column)
    for name, series in times.steps.items():
        low, middle, high = statistics.quantiles(series, n=4)
        table.add_row(name, f"{middle:.2f}", f"{low:.2f} .. {high:.2f}", f"{np.median(times.over(name)):.2f}x")
    console.print(table)
    console.print(f"pruned over stock at the live length:    {np.median(1 / times.over(LIVE)):.3f}")
    console.print(
        f"confidence of its tokens, over the step: {np.median(times.confidence_share()):.2%}, "
        f"{statistics.median(times.confidence):.3f} ms"
    )


def figures(times: Times) -> dict[str, Any]:
    """Medians and quartiles of the ratios, and the median milliseconds of a step of each kind."""
    ratios = {
        "speedup_over_stock_8k": times.over(LOGICAL),
        "time_over_stock_1k": 1 / times.over(LIVE),
        "confidence_over_step": times.confidence_share(),
    }
    if NATIVE in times.steps:
        ratios["speedup_over_torch_native_8k"] = times.over(NATIVE)
    return {
        **{name: [round(float(np.percentile(series, p)), 5) for p in (50, 25, 75)] for name, series in ratios.items()},
        "milliseconds": {name: round(statistics.median(series), 3) for name, series in times.steps.items()},
    }


if __name__ == "__main__":
    main()
