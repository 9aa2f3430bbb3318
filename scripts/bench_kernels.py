"""ActKV's two kernels over what they replace: in-place compaction over gather-and-copy, recovered attention over
gather-and-softmax. One bf16 layer, pages of 16, 8 KV heads, 32 query heads, D = 128; both sides in this process.

    python scripts/bench_kernels.py --op compact,recover [--json] [--runs 15] [--requests 1,4,16]

compact: a request's survivors lie scattered over its pages. Ours copies those of the emptiest pages into the holes of
the fullest (`apply.compaction`); the other side gathers all survivors into a new buffer and copies them back into the
first pages. Both are handed lists of slots on the device; what making our plan on the host takes is a column of its own.
recover: scores of one query a request over its 1K, 2K or 6K entries, from the log-sum-exp that attention left; the other
side gathers the keys and takes a softmax, all requests in one batch.

Medians of interleaved runs, caches flushed before each. Extra bytes are what the allocator handed out meanwhile, at its
peak. On a GPU if there is one; ratios from a CPU say nothing about a GPU and are labelled.
"""

import argparse
import json
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # read when torch is imported; the profiler reports each use of it
import torch

from intentkv.apply.compaction import plan_compaction
from intentkv.kernels.compact import copy_slots
from intentkv.kernels.linear import has_bf16_gemm
from intentkv.kernels.lse import log_sum_exp
from intentkv.kernels.recover import recover_attention
from intentkv.kernels.slot_lists import SlotLists

PAGE, H_KV, GROUP, DIM = 16, 8, 4, 128
LENGTHS = ((1024, 512), (2048, 1536), (6144, 4096))
FLUSH_BYTES = 128 * 2**20


def measure(ours: Callable[[], None], theirs: Callable[[], None], device: str, runs: int) -> tuple[float, float]:
    """Median microseconds of each, taken in turn; the first two runs warm up."""
    flush = torch.empty(FLUSH_BYTES, dtype=torch.uint8, device=device)
    series: tuple[list[float], list[float]] = ([], [])
    for run in range(runs + 2):
        for times, call in zip(series, (ours, theirs), strict=True):
            flush.fill_(run)
            if device == "cuda":
                torch.cuda.synchronize()
            start = time.perf_counter()
            call()
            if device == "cuda":
                torch.cuda.synchronize()
            if run >= 2:
                times.append(1e6 * (time.perf_counter() - start))
    return statistics.median(series[0]), statistics.median(series[1])


def extra_bytes(call: Callable[[], None], device: str) -> int:
    """The most bytes that the allocator has handed out at once during a call, beyond what was out before."""
    call()
    if device == "cuda":
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        call()
        torch.cuda.synchronize()
        return torch.cuda.max_memory_allocated() - before
    activities = [torch.profiler.ProfilerActivity.CPU]
    with torch.profiler.profile(activities=activities, profile_memory=True) as profile:
        call()
    with tempfile.TemporaryDirectory() as folder:
        trace = Path(folder) / "trace.json"
        profile.export_chrome_trace(str(trace))
        events = json.loads(trace.read_text())["traceEvents"]
    steps = [
        event["args"]["Bytes"]
        for event in sorted(events, key=lambda e: e.get("ts", 0))
        if event.get("name") == "[memory]"
    ]
    return int(max(np.cumsum(steps), default=0))


class Case:
    """`requests` requests of `length` entries each in a pool of shuffled pages, of which `kept` survive."""

    def __init__(self, requests: int, length: int, kept: int, device: str) -> None:
        rng = np.random.default_rng(0)
        pages = length // PAGE
        order = rng.permutation(requests * pages) + 1
        slots = (order[:, None] * PAGE + np.arange(PAGE)).reshape(requests, length)
        self.rows = list(slots)
        self.keep = [np.isin(np.arange(length), rng.choice(length, kept, replace=False)) for _ in range(requests)]
        shape = ((requests * pages + 1) * PAGE, H_KV, DIM)
        self.keys, self.values = (torch.randn(shape, device=device).bfloat16() for _ in range(2))
        self.query = torch.randn(requests, H_KV * GROUP, DIM, device=device).bfloat16()
        self.kept = kept
        self.device = device

    def plans(self) -> tuple[np.ndarray, np.ndarray]:
        """Sources and destinations of all requests."""
        all_private = np.ones(len(self.rows[0]), bool)
        plans = [plan_compaction(row, keep, all_private, PAGE) for row, keep in zip(self.rows, self.keep, strict=True)]
        return np.concatenate([p.sources for p in plans]), np.concatenate([p.destinations for p in plans])

    def slots(self, chosen: list[np.ndarray]) -> torch.Tensor:
        return torch.from_numpy(np.concatenate(chosen)).to(self.device)


def bench_compact(case: Case, runs: int) -> dict[str, float]:
    start = time.perf_counter()
    planned = case.plans()
    plan_us = 1e6 * (time.perf_counter() - start)
    sources, destinations = (torch.from_numpy(part).to(case.device) for part in planned)
    kept = case.slots([row[keep] for row, keep in zip(case.rows, case.keep, strict=True)])
    first = case.slots([row[: case.kept] for row in case.rows])
    scratch = [pool.clone() for pool in (case.keys, case.values)]  # the other side works on a pool of its own

    def ours() -> None:
        copy_slots(case.keys, case.values, sources, destinations)

    def gather_and_copy() -> None:
        for pool in scratch:
            pool.index_copy_(0, first, pool.index_select(0, kept))

    bytes_ours, bytes_theirs = extra_bytes(ours, case.device), extra_bytes(gather_and_copy, case.device)
    us, their_us = measure(ours, gather_and_copy, case.device, runs)
    return {
        "us": us,
        "baseline_us": their_us,
        "bytes": bytes_ours,
        "baseline_bytes": bytes_theirs,
        "plan_us": plan_us,
        "moved": len(sources),
    }


def bench_recover(case: Case, runs: int) -> dict[str, float]:
    lists = SlotLists.of([torch.from_numpy(row).to(case.device) for row in case.rows])
    scale = DIM**-0.5
    lse = log_sum_exp(case.query, case.keys, lists, scale)
    out = torch.zeros(H_KV, len(lists.slots), device=case.device)
    table = lists.slots.view(len(case.rows), -1)
    grouped = case.query.view(-1, H_KV, GROUP, DIM)

    def ours() -> None:
        recover_attention(case.query, case.keys, lists, lse, scale, out)

    # Without bf16 instructions a CPU multiplies bf16 matrices slowly: the other side then gets the faster product.
    dtype = torch.bfloat16 if case.device == "cuda" or has_bf16_gemm() else torch.float32

    def gather_and_softmax() -> None:
        logits = torch.einsum("rhgd,rnhd->rhgn", grouped.to(dtype), case.keys[table].to(dtype)) * scale
        logits.float().softmax(-1).amax(2)

    bytes_ours, bytes_theirs = extra_bytes(ours, case.device), extra_bytes(gather_and_softmax, case.device)
    us, their_us = measure(ours, gather_and_softmax, case.device, runs)
    return {"us": us, "baseline_us": their_us, "bytes": bytes_ours, "baseline_bytes": bytes_theirs}


OPS = {"compact": bench_compact, "recover": bench_recover}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--op", default="compact,recover", help="of compact and recover (default: %(default)s)")
    parser.add_argument("--requests", default="1,4,16", help="concurrent requests (default: %(default)s)")
    parser.add_argument("--runs", type=int, default=15, help="timed runs of each, at least 5 (default: %(default)s)")
    parser.add_argument("--threads", type=int, default=1, help="torch threads on a CPU (default: %(default)s)")
    parser.add_argument("--json", action="store_true", help="print one JSON object as the last line")
    args = parser.parse_args()
    ops, requests = args.op.split(","), [int(count) for count in args.requests.split(",")]
    if not set(ops) <= set(OPS) or args.runs < 5 or min(requests) < 1:
        parser.error(f"expected --op of {', '.join(OPS)}, --runs of at least 5 and --requests above 0")
    torch.set_num_threads(args.threads)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    name = torch.cuda.get_device_name() if device == "cuda" else f"CPU, {args.threads} threads: no figure for a GPU"

    print(f"{name}; bf16, pages of {PAGE}, {H_KV} KV heads, {H_KV * GROUP} query heads, D = {DIM}")
    result: dict[str, Any] = {"device": name, "runs": args.runs, "rows": []}
    for op in ops:
        header = f"{op:8}{'requests':>10}{'ours':>13}{'baseline':>13}{'speed-up':>10}{'our bytes':>14}{'theirs':>14}"
        print(header + (f"{'entries moved':>15}{'plan on host':>15}" if op == "compact" else ""))
        rows = []
        for length, kept in LENGTHS:
            for count in requests:
                row = OPS[op](Case(count, length, kept, device), args.runs)
                speedup = row["baseline_us"] / row["us"]
                rows.append({"op": op, "requests": count, "length": length, "kept": kept, "speedup": speedup, **row})
                shape = f"{length // 1024}K>{kept / 1024:g}K" if op == "compact" else f"{length // 1024}K"
                line = f"{shape:8}{count:10}{row['us']:10.0f} us{row['baseline_us']:10.0f} us{speedup:9.2f}x"
                line += f"{row['bytes']:14,}{row['baseline_bytes']:14,}"
                print(line + (f"{row['moved']:15,}{row['plan_us']:12.0f} us" if op == "compact" else ""), flush=True)
        mean = statistics.mean(row["speedup"] for row in rows)
        print(f"{op}: {mean:.2f}x on average")
        result[f"{op}_speedup_mean"] = round(mean, 3)
        result[f"{op}_extra_bytes"] = max(row["bytes"] for row in rows)
        result["rows"] += rows
    if "compact" in ops:
        result["extra_kv_bytes"] = result.pop("compact_extra_bytes")
    if args.json:
        print(json.dumps(result))


if __name__ == "__main__":
    main()
