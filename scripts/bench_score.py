"""What scoring costs beside the prefill of the same tokens, and how much memory it takes at most: SmolLM2, on the CPU.

    python scripts/bench_score.py [--json] [--lengths 2048 4096 8192] [--runs 5] [--threads 1]

A prefill is one forward of the model with `transformers`, without its language-model head: in float32, which a CPU without
bf16 instructions computes faster than bf16, so that the share is not flattered. Scored are all tokens but a query span of
256 at the end, once for each scorer, on the bf16 keys of that very forward at random slots of a pool. One prefill a
length, as it takes long, and the median of `--runs` scores. For `intent` the surprise of every token of the prompt is
measured too, every time: a server does that once a token, as part of its prefill. The workspace is the most that a scorer held at once
beyond its result.
"""

import argparse
import dataclasses
import json
import statistics
import time

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor

from intentkv.evals.model import model_path
from intentkv.kernels.surprise import token_surprise
from intentkv.score.base import ScoreInput, Scorer
from intentkv.score.head.model import ResidualHead
from intentkv.score.intent import IntentScorer
from intentkv.score.intent_head import IntentHeadScorer
from intentkv.score.rule import RuleScorer
from intentkv.train.capture import Captured, CaptureModel

QUERY_TOKENS = 256


class IntentWithSurprise(IntentScorer):
    """`intent` and what it observes during a prefill of hidden states `[N, E]`, both in the model's dtype on a server."""

    def __init__(self, hidden: Tensor, ids: Tensor, head: Tensor) -> None:
        self._hidden, self._ids, self._head = hidden, ids, head

    def score(self, x: ScoreInput) -> Tensor:
        surprise = token_surprise(self._hidden[:-1], self._ids[1:], self._head)
        return super().score(dataclasses.replace(x, surprise=surprise[x.positions - 1]))


def scorers(head_dim: int, hidden: Tensor, ids: Tensor, head: Tensor) -> list[Scorer]:
    """The default with its surprise, the published rule, the same rescaled, and the rule with an untrained head, which costs
    what a trained one does."""
    return [
        IntentWithSurprise(hidden, ids, head),
        RuleScorer("intent-rule", temperature=1.0),
        RuleScorer("intent-rescaled", temperature="rescaled"),
        IntentHeadScorer(ResidualHead(head_dim)),
    ]


def score_input(captured: Captured, length: int) -> ScoreInput:
    """The event at the end of the prompt; keys lie at random slots, as in a pool after hours of serving."""
    slots = torch.randperm(2 * length, generator=torch.Generator().manual_seed(0))[:length]
    pool = []
    for keys in captured.keys:
        pool.append(torch.zeros(2 * length, *keys.shape[1:], dtype=keys.dtype))
        pool[-1][slots] = keys
    query = captured.queries[0].mean()
    history = length - QUERY_TOKENS
    return ScoreInput(
        layer_keys=pool.__getitem__,
        slots=slots[:history],
        positions=torch.arange(history),
        share=0.25,
        segments=torch.arange(history) // 20,
        memory=torch.nn.functional.normalize(query, dim=-1),
        query=query,
        seed=0,
        num_layers=len(pool),
        query_slots=slots[history:],
        dialogue=torch.arange(history) % 400 < 20,  # a short message now and then
        words=torch.arange(history) // 2,
    )


def seconds(scorer: Scorer, x: ScoreInput, runs: int) -> float:
    """Median time of a score."""
    scorer.score(x)  # warms up
    times = []
    for _ in range(runs):
        start = time.perf_counter()
        scorer.score(x)
        times.append(time.perf_counter() - start)
    return statistics.median(times)


def workspace_bytes(scorer: Scorer, x: ScoreInput) -> int:
    """The most bytes that one score allocated at once, its result left out."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        scores = scorer.score(x)
    events = [event for event in profile.profiler.kineto_results.events() if event.name() == "[memory]"]
    held = peak = 0
    for event in sorted(events, key=lambda event: event.start_ns()):
        held += event.nbytes()
        peak = max(peak, held)
    return peak - scores.nbytes


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument(
        "--lengths", type=int, nargs="+", default=[2048, 4096, 8192], help="tokens (default: %(default)s)"
    )
    parser.add_argument("--runs", type=int, default=5, help="timed scores of each (default: %(default)s)")
    parser.add_argument("--threads", type=int, default=1, help="torch threads (default: %(default)s)")
    parser.add_argument("--json", action="store_true", help="print one JSON object as the last line")
    args = parser.parse_args()
    if min(args.lengths) <= QUERY_TOKENS or args.runs < 1:
        parser.error(
            f"expected --lengths above {QUERY_TOKENS} and --runs of at least 1, got {args.lengths}, {args.runs}"
        )
    torch.set_num_threads(args.threads)

    model = CaptureModel(model_path())
    head = model.model.get_input_embeddings().weight.detach().to(model.dtype)  # the LM head of SmolLM2 is its embedding
    model.forward(torch.arange(QUERY_TOKENS), [(0, QUERY_TOKENS)])  # warms up
    table = Table("tokens", "prefill", "scorer", "score", "score / prefill", "workspace")
    shares: dict[str, dict[str, float]] = {}
    workspace: dict[str, float] = {}
    for length in args.lengths:
        generator = torch.Generator().manual_seed(length)
        ids = torch.randint(model.model.config.vocab_size, (length,), generator=generator)
        start = time.perf_counter()
        captured = Captured([(length - QUERY_TOKENS, length)], model.dtype)
        hidden = model.run(ids, captured).to(model.dtype)
        prefill = time.perf_counter() - start
        x = score_input(captured, length)
        for scorer in scorers(model.identity.head_dim, hidden, ids, head):
            taken, held = seconds(scorer, x, args.runs), workspace_bytes(scorer, x) / 2**20
            shares.setdefault(scorer.name, {})[str(length)] = round(taken / prefill, 5)
            workspace[scorer.name] = round(max(held, workspace.get(scorer.name, 0.0)), 2)
            table.add_row(
                str(length),
                f"{prefill:.2f} s",
                scorer.name,
                f"{1e3 * taken:.1f} ms",
                f"{taken / prefill:.2%}",
                f"{held:.1f} MiB",
            )
    Console().print(table)
    if args.json:
        # The figures of the costliest scorer: what holds for it holds for all.
        worst = {length: max(of[length] for of in shares.values()) for length in map(str, args.lengths)}
        result = {"score_over_prefill": worst, "workspace_mib": max(workspace.values())}
        print(json.dumps({**result, "by_scorer": shares, "workspace_by_scorer": workspace, "threads": args.threads}))


if __name__ == "__main__":
    main()
