"""What each way to rank keeps of generated sessions: facts that a later turn asks for, live in full when it does.

    python scripts/ablate_scores.py [--sessions 100 --seed 5000 --head build/head/head.safetensors --out docs/results/ablation.json]

No server: one forward a session, see `intentkv.evals.offline` for what that leaves out. Budgets are shares of a session's
final length, in tokens.
"""

import argparse
import dataclasses
import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from rich.console import Console
from rich.progress import track
from rich.table import Table

from intentkv.config import Settings
from intentkv.engine.chat_format import message_format, token_marks
from intentkv.evals.model import model_path
from intentkv.evals.offline import Replay, Replayer, facts_kept
from intentkv.evals.plan import add_session_arguments, planned_sessions
from intentkv.evals.provenance import provenance
from intentkv.observe.segments import LONGEST
from intentkv.score.base import Need, ScoreInput, Scorer
from intentkv.score.intent import TOP, UNGUESSED, IntentScorer, largest_in_segments, word_surprise
from intentkv.score.registry import make_scorer
from intentkv.score.rule import RuleScorer

BUDGETS = (50, 25, 12)  # percent
DECAY = Settings().memory_decay
FORGETS = 100.0  # the decay of a memory that is this turn's query alone
BOUND = "what will be asked for, first"


@dataclasses.dataclass(frozen=True)
class Row:
    """One line of the table: `score` a candidate, with the query memory's decay."""

    score: Callable[[ScoreInput], torch.Tensor]
    decay: float = DECAY
    name: str = "ablation"
    needs: frozenset[Need] = frozenset()


def without_dialogue(x: ScoreInput) -> torch.Tensor:
    return IntentScorer().score(dataclasses.replace(x, dialogue=torch.zeros(len(x.slots), dtype=torch.bool)))


def by_words(length: float, most: float = UNGUESSED) -> Callable[[ScoreInput], torch.Tensor]:
    """One order in place of two: worth over a segment's length to the power `length`; `most`: nats that a word counts for."""

    def score(x: ScoreInput) -> torch.Tensor:
        assert x.surprise is not None and x.words is not None
        sums, lengths = largest_in_segments(word_surprise(x.surprise, x.words, most), x.segments, TOP)
        return sums / lengths**length

    return score


def by_tokens(top: int, length: float) -> Callable[[ScoreInput], torch.Tensor]:
    """The surprise of single tokens, the `top` largest of a segment, over its length to the `length`."""

    def score(x: ScoreInput) -> torch.Tensor:
        assert x.surprise is not None
        sums, lengths = largest_in_segments(x.surprise, x.segments, top)
        return sums / lengths**length

    return score


def surprise_by_token(x: ScoreInput) -> torch.Tensor:
    assert x.surprise is not None
    return x.surprise


def short_first(x: ScoreInput) -> torch.Tensor:
    """Short sentences first: what the length alone tells."""
    return 1 / largest_in_segments(torch.ones(len(x.slots)), x.segments, 1)[1]


def asked_first(replay: Replay) -> Callable[[ScoreInput], torch.Tensor]:
    """The sentences with what this session asks for, then the newest: more than any ranking can know, and what it could reach."""
    told = torch.from_numpy(np.concatenate([prompt.stated_in for prompt in replay.prompts]))

    def score(x: ScoreInput) -> torch.Tensor:
        return torch.isin(x.segments, told).float() * replay.length + x.positions

    return score


def times_rank(rule: RuleScorer, weight: float) -> Callable[[ScoreInput], torch.Tensor]:
    """Worth over a segment's length to the 0.4, times 1 + weight * rank of the memory's score averaged over the segment."""

    def score(x: ScoreInput) -> torch.Tensor:
        sums, lengths = largest_in_segments(rule.score(x), x.segments, LONGEST)
        ranks = (sums / lengths).argsort(stable=True).argsort(stable=True) / max(1, len(x.slots))
        return by_words(0.4)(x) * (1 + weight * ranks)

    return score


def rows(head: str | None) -> dict[str, Row]:
    rule, rescaled = RuleScorer("rule", temperature=1.0), RuleScorer("rescaled", temperature="rescaled")
    fixed = {t: RuleScorer("fixed", temperature=t) for t in (0.25, 0.1)}
    named = ("streaming", "random", "random-sentence", "keydiff", "snapkv")
    table = {
        "intent": Row(IntentScorer().score),
        "intent without the dialogue": Row(without_dialogue),
        "by the segment": Row(by_words(0)),
        "by the token": Row(by_words(1)),
        "by the length to the 0.4": Row(by_words(0.4)),
        "... words without a limit": Row(by_words(0.4, most=torch.inf)),
        "... x memory (0.3)": Row(times_rank(rule, 0.3)),
        "... x memory (1.0)": Row(times_rank(rule, 1.0)),
        "sum of 4 tokens, by the token": Row(by_tokens(4, 1)),
        "sum of 6 tokens, by the segment": Row(by_tokens(6, 0)),
        "surprise by token": Row(surprise_by_token),
        "short sentences first": Row(short_first),
        "intent-rule: memory, T = 1": Row(rule.score),
        "intent-rescaled: memory, T rescaled": Row(rescaled.score),
        **{f"memory, T = {t}": Row(scorer.score) for t, scorer in fixed.items()},
        "query only, T = 1": Row(rule.score, FORGETS),
        "query only, T rescaled": Row(rescaled.score, FORGETS),
        **{name: Row(make_scorer(name, Settings()).score) for name in named},
    }
    if head is not None:
        scorer: Scorer = make_scorer("intent-head", Settings(head=head))
        table["intent-head"] = Row(scorer.score)
    return table


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    add_session_arguments(parser, sessions=100, seed=5000)
    parser.add_argument("--head", help="a residual head's file, for one row more")
    parser.add_argument("--rows", nargs="+", metavar="NAME", help="of the table, as it prints them (default: all)")
    parser.add_argument("--threads", type=int, default=None, help="torch threads (default: torch's choice)")
    parser.add_argument("--out", type=Path, help="JSON file to write")
    arguments = parser.parse_args()
    if arguments.threads is not None:
        torch.set_num_threads(arguments.threads)
    table = rows(arguments.head)
    unknown = set(arguments.rows or table) - set(table)
    if unknown:
        parser.error(f"--rows: expected some of {', '.join(map(repr, table))}, got {sorted(unknown)}")
    table = {name: row for name, row in table.items() if name in (arguments.rows or table)}
    console = Console(width=110)
    replayer = Replayer(str(model_path()), lambda tokenizer: message_format(tokenizer, None), token_marks)
    samples: dict[str, dict[str, list[list[bool]]]] = {name: {str(b): [] for b in BUDGETS} for name in (*table, BOUND)}
    lengths, names = [], []
    for session in track(planned_sessions(arguments), "sessions", console=console, transient=True):
        replay = replayer.read(session)
        names.append(replay.name)
        lengths.append(replay.length)
        for name, row in {**table, BOUND: Row(asked_first(replay))}.items():
            for budget in BUDGETS:
                kept = facts_kept(replay, row, replay.length * budget // 100, row.decay)
                samples[name][str(budget)].append(kept)
    families = [name.rpartition("-")[0] for name in names]
    for family in dict.fromkeys(families):
        chosen = [i for i, of in enumerate(families) if of == family]
        part = {
            name: {budget: [kept[i] for i in chosen] for budget, kept in budgets.items()}
            for name, budgets in samples.items()
        }
        print_table(console, part, f"{family}, {len(chosen)} sessions")
    print_table(console, samples, f"all {len(names)} sessions")
    if arguments.out is not None:
        arguments.out.parent.mkdir(parents=True, exist_ok=True)
        result = {"kind": "ablation", **provenance(), "sessions": names, "lengths": lengths, "facts_kept": samples}
        arguments.out.write_text(json.dumps(result) + "\n", encoding="utf-8")


def print_table(console: Console, samples: dict[str, dict[str, list[list[bool]]]], sessions: str) -> None:
    shown = Table(
        "ranked by",
        *(f"{budget} %" for budget in BUDGETS),
        title=f"{sessions}: facts of the history live in full, % (95 % interval)",
    )
    for name, budgets in samples.items():
        shown.add_row(name, *(_cell(budgets[str(budget)]) for budget in BUDGETS))
    console.print(shown)


def _cell(sessions: list[list[bool]]) -> str:
    """Mean and bootstrap interval over sessions."""
    right = np.array([sum(kept) for kept in sessions], dtype=float)
    count = np.array([len(kept) for kept in sessions], dtype=float)
    drawn = np.random.default_rng(0).integers(len(sessions), size=(2000, len(sessions)))
    low, high = np.quantile(right[drawn].sum(1) / count[drawn].sum(1), [0.025, 0.975])
    return f"{100 * right.sum() / count.sum():.0f}  ({100 * low:.0f}-{100 * high:.0f})"


if __name__ == "__main__":
    main()
