"""How much prefix reuse and memory pruned sessions keep: SGLang's own cache, pools and admission, and no model.

    python scripts/sim_reclaim.py            # the table
    python scripts/sim_reclaim.py --json     # and one JSON object as the last line

Eight agents share a system prompt of 512 tokens and take twelve turns, 500 tokens in and 100 out, in turn. Ours keeps
1,500 tokens a session: which ones is drawn at random, since only their number matters here. The second table mixes
eight such agents with eight chats that are not managed (120 tokens in, 30 out), in random order and in pools too small
for all, and counts who finds how much of its past in turns 5 to 12: neither group may pay for the other.

The third table is about pages of 16. Eight sessions of 4,096 tokens and a system prompt keep a share of their history, by
scores that are drawn token by token or sentence by sentence. It counts which slots come back if tokens are dropped but
only pages that are dead as a whole are freed, and if survivors are packed first; and how much of the tokens that score
best is kept if, instead, whole pages are chosen by the mean of their scores.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from sglang.srt.managers.schedule_batch import Req
from sglang.srt.mem_cache.unified_radix_cache import UnifiedRadixCache

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from intentkv.apply.rows import NO_POSITIONS, droppable, live_positions
from intentkv.engine.cache import IntentKVRadixCache
from intentkv.keep.budget import Budget
from intentkv.keep.forced import whole_pages
from intentkv.keep.select import choose_drop
from tests.host.pools import publish_settings
from tests.host.world import World

SYSTEM, TURNS, AGENTS, BUDGET, AMPLE = 512, 12, 8, 1500, 100_000
AGENT_TURN, CHAT_TURN = (500, 100), (120, 30)  # tokens in, tokens out


class Pool(World):
    """A world that counts instead of checking."""

    def __init__(
        self, ours: bool, size: int, page_size: int, budget: int | None, core: str, chunk: int = 1 << 20
    ) -> None:
        cache_class = IntentKVRadixCache if ours else UnifiedRadixCache
        size = size // page_size * page_size
        super().__init__(core, page_size, size, cache_class=cache_class, context=1 << 14, chunk=chunk)
        self.budget = budget
        self.rng = np.random.default_rng(0)
        self.decide = self.drop_to_budget

    def drop_to_budget(self, req: Req, length: int) -> np.ndarray:
        """Positions beyond the system prompt, whole pages, until the request has `budget` live tokens."""
        holes = self.holes_of(req)
        excess = length - len(holes) - self.budget if self.budget is not None else 0
        if excess < self.page_size or req.finished():
            return NO_POSITIONS
        live = live_positions(SYSTEM, (length - 1) // self.page_size * self.page_size, holes)
        pages = live.reshape(-1, self.page_size)
        return np.sort(self.rng.choice(pages, min(len(pages), excess // self.page_size), replace=False).ravel())

    def next_token(self, req: Req) -> int:
        return int(self.rng.integers(1 << 20))

    def compute(self, req: Req, start: int, end: int) -> None:
        pass

    def move(self, sources: np.ndarray, destinations: np.ndarray) -> None:
        pass


@dataclass
class Agent:
    """One conversation; `session` is None for one that the cache does not manage."""

    session: str | None
    text: list[int]
    turn_tokens: tuple[int, int]
    rng: random.Random
    asked: list[int] = field(default_factory=list)  # by turn: length of the prompt
    found: list[int] = field(default_factory=list)  # by turn: how much of it was found

    def turn(self, pool: Pool) -> None:
        prompt, output = self.turn_tokens
        self.text += [self.rng.randrange(1 << 20) for _ in range(prompt)]
        req = pool.serve(pool.request(self.text, self.session, new=output))
        self.asked.append(len(self.text))
        self.found.append(pool.found[req.rid])
        self.text = list(req.origin_input_ids + req.output_ids)


def agents(managed: bool, turn_tokens: tuple[int, int] = AGENT_TURN, kind: str = "agent") -> list[Agent]:
    system = list(range(1, SYSTEM + 1))
    names = [f"{kind}{i}" for i in range(AGENTS)]
    return [Agent(name if managed else None, list(system), turn_tokens, random.Random(name)) for name in names]


def hit_rate(group: list[Agent], first_turn: int = 0) -> float:
    asked = sum(sum(agent.asked[first_turn:]) for agent in group)
    return sum(sum(agent.found[first_turn:]) for agent in group) / asked


def fixed(ours: bool, size: int, page_size: int, core: str) -> dict[str, float]:
    """The first table's scenario; one row of it."""
    pool, group = Pool(ours, size, page_size, BUDGET, core), agents(managed=ours)
    for _ in range(TURNS):
        for agent in group:
            agent.turn(pool)
    stats = pool.cache.stats() if ours else {"dropped": 0, "freed": 0}
    return {
        "hit": hit_rate(group),
        "prefilled": sum(sum(agent.asked) - sum(agent.found) for agent in group),
        "available": pool.allocator.available_size(),
        "evictable": pool.cache.evictable_size(),
        "dropped": stats["dropped"],
        "freed": stats["freed"],
    }


def unpruned_equals_stock(page_size: int, core: str) -> bool:
    """Whether a run in which nothing is pruned leaves every hit and the free list as SGLang's own cache does."""
    traces = []
    for ours in (False, True):
        pool, group = Pool(ours, 30_000, page_size, None, core), agents(managed=ours)
        order = random.Random(1)
        for _ in range(TURNS):
            for agent in order.sample(group, len(group)):
                agent.turn(pool)
        traces.append(([agent.found for agent in group], pool.allocator.get_all_free_pages().tolist()))
    return traces[0] == traces[1]


def mix(ours: bool, size: int, core: str, idle_from: int, chunk: int) -> tuple[float, float]:
    """The second table's scenario: hit rates of managed agents and of plain chats in turns 5 to 12."""
    pool = Pool(ours, size, 1, BUDGET, core, chunk)
    managed, chats = agents(managed=True), agents(managed=False, turn_tokens=CHAT_TURN, kind="chat")
    order = random.Random(3)
    for turn in range(TURNS):
        active = (managed if turn < idle_from else []) + chats
        for agent in order.sample(active, len(active)):
            agent.turn(pool)
    return hit_rate(managed, 4), hit_rate(chats, 4)


class OneEvent(Pool):
    """A pool of pages of 16 whose sessions drop all but `share` of their history, once, by scores of a `kind`."""

    def __init__(self, core: str, share: float, kind: str) -> None:
        super().__init__(True, AMPLE, 16, None, core)
        self.share, self.kind = share, kind
        self.counts = dict.fromkeys(("dropped", "dead pages", "moved", "best", "best by pages"), 0)

    def move(self, sources: np.ndarray, destinations: np.ndarray) -> None:
        self.counts["moved"] += len(sources)

    def drop_to_budget(self, req: Req, length: int) -> np.ndarray:
        if req.finished() or len(self.holes_of(req)):
            return NO_POSITIONS
        forced = np.zeros(length, np.bool_)
        forced[:SYSTEM] = forced[-128:] = True
        budget = Budget("share", 100 * self.share)
        scores, none = self.scores(length - SYSTEM - 128), NO_POSITIONS
        drop = choose_drop(scores, forced, none, budget, 1, 16)
        pages = choose_drop(scores, whole_pages(forced, 16), none, budget, 1, 16, whole_pages=True)
        self.counts["dropped"] += len(drop)
        self.counts["dead pages"] += len(droppable(drop, none, length, 16, whole_pages=True))
        best = np.setdiff1d(np.flatnonzero(~forced), drop)
        self.counts["best"] += len(best)
        self.counts["best by pages"] += len(np.setdiff1d(best, pages))
        return drop

    def scores(self, count: int) -> np.ndarray:
        """One number a token, `[count]` float32: its own, or that of its sentence of 5 to 40 tokens."""
        drawn = self.rng.random(count)
        if self.kind == "sentences":
            drawn = np.repeat(drawn, self.rng.integers(5, 41, count))[:count]
        return drawn.astype(np.float32)


def packed(core: str, share: float, kind: str) -> dict[str, float]:
    """One row of the third table, as shares of the slots of dropped tokens, and of the tokens that score best."""
    pool = OneEvent(core, share, kind)
    for agent in agents(managed=True, turn_tokens=(4096, 2)):
        agent.turn(pool)
    counts, stats = pool.counts, pool.cache.stats()
    assert stats["dropped"] == counts["dropped"]
    return {
        "dead_pages": counts["dead pages"] / counts["dropped"],
        "packed": stats["freed"] / counts["dropped"],
        "moved": counts["moved"] / counts["best"],
        "kept_by_pages": counts["best by pages"] / counts["best"],
    }


def print_packed(core: str) -> dict[str, dict[str, float]]:
    """The third table."""
    names = ("scores by", "kept", "freed: dead pages", "freed: packed", "moved of kept", "best kept by pages")
    print("{:>10} {:>5} {:>18} {:>14} {:>14} {:>19}".format(*names))
    rows = {}
    for kind in ("tokens", "sentences"):
        for share in (0.5, 0.25, 0.12):
            row = packed(core, share, kind)
            print(
                f"{kind:>10} {share:>5.0%} {row['dead_pages']:>18.1%} {row['packed']:>14.1%} {row['moved']:>14.1%} "
                f"{row['kept_by_pages']:>19.1%}"
            )
            rows[f"{kind}@{share:.0%}"] = {name: round(value, 4) for name, value in row.items()}
    return rows


def print_fixed(core: str) -> dict[str, object]:
    """The first table; returns its figures by the names they have in the JSON object."""
    results: dict[str, object] = {}
    names = ("pool", "page", "cache", "hit rate", "prefilled", "available", "evictable", "dropped", "freed at once")
    print("{:>6} {:>4} {:>6} {:>9} {:>10} {:>10} {:>10} {:>8} {:>14}".format(*names))
    for page_size in (1, 16):
        for label, size in (("ample", AMPLE), ("30k", 30_000), ("12k", 12_000)):
            for ours in (False, True):
                row = fixed(ours, size, page_size, core)
                print(
                    f"{label:>6} {page_size:>4} {'ours' if ours else 'stock':>6} {row['hit']:>9.3f} "
                    f"{row['prefilled']:>10,} {row['available']:>10,} {row['evictable']:>10,} "
                    f"{row['dropped']:>8,} {row['freed']:>14,}"
                )
                suffix = label + ("" if page_size == 1 else "_page16")
                results[f"hit_{suffix}" if ours else f"hit_stock_{suffix}"] = round(row["hit"], 4)
                if ours and suffix == "30k":
                    results |= {"dropped": row["dropped"], "freed_at_once": row["freed"]}
                    results |= {"available_30k": row["available"], "evictable_30k": row["evictable"]}
    return results


def print_mix(core: str) -> dict[str, dict[str, list[float]]]:
    """The second table: stock, ours, and ours with an event after each chunk of 1,024 tokens."""
    print(f"{'pool':>22} {'stock':>13} {'ours':>13} {'ours, chunks':>13}     hit rate managed / plain, turns 5 to 12")
    rows = {}
    for label, size, idle_from in (
        ("14k", 14_000, TURNS),
        ("20k", 20_000, TURNS),
        ("14k, idle from turn 7", 14_000, 7),
    ):
        runs = {"stock": (False, 1 << 20), "ours": (True, 1 << 20), "chunks": (True, 1024)}
        rates = {name: mix(ours, size, core, idle_from, chunk) for name, (ours, chunk) in runs.items()}
        print(f"{label:>22} " + " ".join(f"{managed:>6.2f} /{plain:>5.2f}" for managed, plain in rates.values()))
        rows[label] = {name: [round(rate, 4) for rate in pair] for name, pair in rates.items()}
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="print one JSON object as the last line")
    parser.add_argument("--core", choices=("rust", "python"), default="rust", help="SGLang's tree core (default: rust)")
    options = parser.parse_args()
    publish_settings()
    results = print_fixed(options.core)
    equal = all(unpruned_equals_stock(page_size, options.core) for page_size in (1, 16))
    answer = "yes" if equal else "NO"
    print(f"\nnothing pruned, 30k: every hit and the free list as in SGLang's own cache: {answer}\n")
    mixed = print_mix(options.core)
    print()
    pages = print_packed(options.core)
    if options.json:
        print(json.dumps({**results, "unpruned_equals_stock": equal, "mix": mixed, "pages": pages}))


if __name__ == "__main__":
    main()
