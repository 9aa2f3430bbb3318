"""How much faster intentkv's CPU attention is than SGLang's torch-native backend: one layer of SmolLM2, both in this process.

    python scripts/bench_attention.py [--json] [--runs 15] [--threads 1]

decode: one token of one request with `--context` cached tokens. extend: a one-token prefill of the same cached prefix, which is
what a request with a full prefix hit pays before its first token. Medians of interleaved runs. One thread unless told
otherwise: with more, every parallel region waits for the slowest, and on a busy machine both columns measure that wait.
"""

import argparse
import json
import statistics
import time
from types import SimpleNamespace

import torch
from sglang.srt.layers.attention.torch_native_backend import TorchNativeAttnBackend
from sglang.srt.layers.radix_attention import RadixAttention
from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool, ReqToTokenPool
from sglang.srt.model_executor.forward_batch_info import ForwardBatch, ForwardMode

from intentkv.engine.cpu_attention import CpuAttentionBackend

H_Q, H_KV, DIM = 9, 3, 64  # SmolLM2-135M


def one_token(mode: ForwardMode, slots: torch.Tensor) -> ForwardBatch:
    """A forward that computes the last token of row 1."""
    length = torch.tensor([len(slots)])
    batch = ForwardBatch(
        forward_mode=mode,
        batch_size=1,
        input_ids=torch.zeros(1, dtype=torch.int64),
        req_pool_indices=torch.tensor([1]),
        seq_lens=length,
        out_cache_loc=slots[-1:],
        seq_lens_sum=len(slots),
    )
    batch.extend_seq_lens, batch.extend_prefix_lens = torch.tensor([1]), length - 1
    return batch


def measure(context: int, runs: int) -> tuple[dict[str, dict[str, float]], float]:
    """Median milliseconds of one layer by mode and backend, and the largest difference between the two outputs."""
    torch.manual_seed(0)
    layer = RadixAttention(H_Q, DIM, DIM**-0.5, H_KV, layer_id=0)
    rows = ReqToTokenPool(2, context, "cpu", enable_memory_saver=False)
    pool = MHATokenToKVPool(4 * context, 1, torch.bfloat16, H_KV, DIM, 1, "cpu", enable_memory_saver=False)
    for buffer in (*pool.k_buffer, *pool.v_buffer):
        buffer.copy_(torch.randn(buffer.shape))
    slots = torch.randperm(4 * context)[:context] + 1  # a pool after hours of serving, not a fresh one
    rows.write((1, slice(0, context)), slots.int())
    runner = SimpleNamespace(
        model=layer, dtype=torch.bfloat16, device="cpu", req_to_token_pool=rows, token_to_kv_pool=pool
    )
    backends = {"torch_native": TorchNativeAttnBackend(runner), "intentkv_cpu": CpuAttentionBackend(runner)}
    q, k, v = (torch.randn(1, heads, DIM).bfloat16() for heads in (H_Q, H_KV, H_KV))

    milliseconds, difference = {}, 0.0
    for mode in (ForwardMode.DECODE, ForwardMode.EXTEND):
        batch = one_token(mode, slots)
        times: dict[str, list[float]] = {name: [] for name in backends}
        outputs = {}
        for run in range(runs + 2):
            for name, backend in backends.items():
                start = time.perf_counter()
                backend.init_forward_metadata(batch)  # ours builds its slot list here, though once for all layers
                outputs[name] = backend.forward(q.flatten(1), k, v, layer, batch)
                if run >= 2:  # the first two warm up
                    times[name].append(1e3 * (time.perf_counter() - start))
        milliseconds[mode.name.lower()] = {name: statistics.median(series) for name, series in times.items()}
        difference = max(difference, (outputs["torch_native"] - outputs["intentkv_cpu"]).abs().max().item())
    return milliseconds, difference


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--context", type=int, default=2800, help="cached tokens (default: %(default)s)")
    parser.add_argument("--runs", type=int, default=15, help="timed runs of each, at least 10 (default: %(default)s)")
    parser.add_argument("--threads", type=int, default=1, help="torch threads (default: %(default)s)")
    parser.add_argument("--json", action="store_true", help="print one JSON object as the last line")
    args = parser.parse_args()
    if args.runs < 10 or args.context < 2:
        parser.error(f"expected --runs of at least 10 and --context of at least 2, got {args.runs} and {args.context}")
    torch.set_num_threads(args.threads)

    with torch.inference_mode():
        milliseconds, difference = measure(args.context, args.runs)

    print(f"one bf16 layer, {H_Q} query and {H_KV} KV heads, D = {DIM}, {args.context} tokens, {args.threads} threads")
    print(f"{'':8}{'torch_native':>15}{'intentkv_cpu':>15}{'speed-up':>11}")
    result: dict[str, float | int | dict] = {}
    for mode, of in milliseconds.items():
        speedup = of["torch_native"] / of["intentkv_cpu"]
        result[f"{mode}_speedup"] = round(speedup, 2)
        print(f"{mode:8}{of['torch_native']:12.2f} ms{of['intentkv_cpu']:12.2f} ms{speedup:10.1f}x")
    print(f"largest difference between the outputs: {difference:.1e}")
    if args.json:
        shape = {"context": args.context, "runs": args.runs, "threads": args.threads}
        print(json.dumps({**result, **shape, "milliseconds": milliseconds, "max_difference": difference}))


if __name__ == "__main__":
    main()
