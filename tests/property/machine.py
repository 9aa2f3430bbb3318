"""A random life of the cache: sessions open, go on, fork, edit, run in parallel, prune, lose memory, time out and are aborted.

Every rule is one thing that a scheduler or a client may do next; after each, all invariants are checked. Tokens come
from a tiny vocabulary, so that texts meet by chance.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from sglang.srt.managers.schedule_batch import Req

from intentkv.apply.rows import NO_POSITIONS, page_floor
from intentkv.engine.cache_events import RUNS_SHORT
from intentkv.engine.cache_rows import session_of
from intentkv.engine.session_records import BRANCHES
from tests.host.checks import check_text, check_world, drain
from tests.host.pools import publish_settings
from tests.host.world import World
from tests.property.totals import TOTALS

publish_settings()
SEEDS = st.integers(min_value=1, max_value=1 << 16)
PICKS = st.integers(min_value=0, max_value=1 << 16)
SESSIONS = st.sampled_from(["a", "b", "c", "d", None])


@dataclass
class Turn:
    """A finished turn: what a client could continue, fork or edit."""

    session: str | None
    tokens: list[int]
    scope: tuple[str | None, str | None]
    quiet: bool = True  # nothing was evicted, and its session did nothing else, since it finished


class CacheMachine(RuleBasedStateMachine):
    """One configuration of cache and pool; subclasses choose it."""

    core: ClassVar[str] = "rust"
    page_size: ClassVar[int] = 1
    layout: ClassVar[str] = "reclaim"
    size: ClassVar[int] = 480
    need_sort: ClassVar[bool] = False
    whole_pages: ClassVar[bool] = False

    @initialize(seed=SEEDS)
    def start(self, seed: int) -> None:
        unit = self.page_size
        options = {"layout": self.layout, "chunk": 24 * unit, "need_sort": self.need_sort}
        self.world = World(self.core, unit, self.size * unit, **options)
        self.world.decide = self.decide
        self.world.cache.whole_pages = self.whole_pages
        self.unit = max(1, unit // 4)  # tokens that texts are made of; a page is a few of them
        self.appetite: dict[str, int] = {}
        self.holes: dict[str, np.ndarray] = {}
        self.turns: list[Turn] = []
        self.waiting: list[Req] = []
        self.opened: set[str] = set()
        self.texts: dict[tuple, list[int]] = {}
        rng = np.random.default_rng(seed)
        self.systems = [rng.integers(0, 3, 20 * self.unit).tolist() for _ in range(2)]
        evict = self.world.cache._evict

        def counted(*args, **kwargs):
            result = evict(*args, **kwargs)
            if result.num_tokens_evicted:
                TOTALS["evictions"] += 1
                self.loud()
            return result

        self.world.cache._evict = counted
        move = self.world.move

        def counted_moves(sources: np.ndarray, destinations: np.ndarray) -> None:
            TOTALS["moved"] += len(sources)
            move(sources, destinations)

        self.world.move = counted_moves

    # -- what a client may do

    @rule(session=SESSIONS, seed=SEEDS, system=PICKS, scope=st.sampled_from([None, None, None, "lora"]))
    def open(self, session: str | None, seed: int, system: int, scope: str | None) -> None:
        self.submit(session, self.systems[system % 2] + self.words(seed, 40), (scope, None), seed)

    @precondition(lambda self: self.turns)
    @rule(pick=PICKS, seed=SEEDS)
    def go_on(self, pick: int, seed: int) -> None:
        turn = self.turns[-1 if pick % 2 else pick % len(self.turns)]
        expected = page_floor(len(turn.tokens) - 1, self.page_size) if turn.quiet else None
        self.submit(turn.session, turn.tokens + self.words(seed, 24), turn.scope, seed, expected)

    @precondition(lambda self: self.turns)
    @rule(pick=PICKS, seed=SEEDS, session=SESSIONS)
    def fork(self, pick: int, seed: int, session: str | None) -> None:
        turn = self.turns[pick % len(self.turns)]
        self.submit(session, turn.tokens + self.words(seed, 24), turn.scope, seed)

    @precondition(lambda self: self.turns)
    @rule(pick=PICKS, seed=SEEDS, cut=PICKS)
    def edit(self, pick: int, seed: int, cut: int) -> None:
        turn = self.turns[pick % len(self.turns)]
        self.submit(turn.session, turn.tokens[: cut % len(turn.tokens)] + self.words(seed, 24), turn.scope, seed)

    @precondition(lambda self: self.world.running)
    @rule(pick=PICKS, seed=SEEDS, same=st.booleans(), session=SESSIONS)
    def fork_running(self, pick: int, seed: int, same: bool, session: str | None) -> None:
        req = self.world.running[pick % len(self.world.running)]
        own = session_of(req)
        text = list(req.origin_input_ids + req.output_ids)
        self.submit(own if same else session, text + self.words(seed, 8), (req.extra_key, req.cache_salt), seed)

    @precondition(lambda self: self.world.running or self.world.prefilling)
    @rule(pick=PICKS)
    def disconnect(self, pick: int) -> None:
        reqs = self.world.running + self.world.prefilling
        req = reqs[pick % len(reqs)]
        TOTALS["aborts"] += 1
        self.disturb(req)
        self.world.abort(req)

    @precondition(lambda self: self.waiting)
    @rule(pick=PICKS)
    def time_out(self, pick: int) -> None:
        """A request is given up that waits for its first turn, or to come back after a retraction."""
        self.disturb(self.waiting.pop(pick % len(self.waiting)))
        TOTALS["time-outs"] += 1

    # -- what the scheduler may do

    @precondition(lambda self: self.waiting)
    @rule()
    def admit_waiting(self) -> None:
        if self.world.admit(self.waiting[0]):
            self.waiting.pop(0)

    @precondition(lambda self: self.world.prefilling)
    @rule(pick=PICKS)
    def chunk(self, pick: int) -> None:
        req = self.world.prefilling[pick % len(self.world.prefilling)]
        needed = self.world.chunk + self.page_size
        if self.world.allocator.available_size() + self.world.cache.evictable_size() < needed:
            self.disturb(req)
            self.world.abort(req)  # a real scheduler would have retracted somebody
        else:
            self.world.next_chunk(req)
            self.crowd(req)

    @precondition(lambda self: self.world.running)
    @rule(count=st.integers(1, 4))
    def decode(self, count: int) -> None:
        self.step(self.world.running[:count])

    @precondition(lambda self: self.world.running)
    @rule()
    def decode_to_the_end(self) -> None:
        req = self.world.running[0]
        while req in self.world.running:
            self.step([req])

    def step(self, reqs: list[Req]) -> None:
        retracted = self.world.decode(reqs)
        TOTALS["retractions"] += len(retracted)
        self.waiting += retracted
        for req in reqs:
            if req.finished():
                self.finished(req)

    @precondition(lambda self: self.world.running)
    @rule(pick=PICKS)
    def retract(self, pick: int) -> None:
        req = self.world.running[pick % len(self.world.running)]
        self.world.retract(req)
        self.waiting.append(req)
        TOTALS["retractions"] += 1

    @precondition(lambda self: self.world.running)
    @rule(pick=PICKS, seed=SEEDS)
    def prune_decoding(self, pick: int, seed: int) -> None:
        req = self.world.running[pick % len(self.world.running)]
        self.appetite[req.rid] = seed
        grouped = seed % 2 == 0
        if grouped:
            self.world.allocator.free_group_begin()
        self.world.cache.checkpoint_decoding(req)
        if grouped:
            self.world.allocator.free_group_end()
        self.crowd(req)

    @rule(tokens=st.integers(1, 200))
    def evict(self, tokens: int) -> None:
        self.world.evict(self.world.allocator.available_size() + tokens)

    @precondition(lambda self: self.turns)
    @rule(sure=st.integers(0, 5))
    def drain(self, sure: int) -> None:
        if sure == 0:
            drain(self.world)

    @precondition(lambda self: not self.world.running and not self.world.prefilling)
    @rule(sure=st.integers(0, 20))
    def flush(self, sure: int) -> None:
        if sure == 7:  # rarely: a world begins anew
            self.world.flush()
            self.turns.clear()
            TOTALS["flushes"] += 1
            assert self.world.allocator.available_size() == self.world.size

    # -- bookkeeping of the machine itself

    def words(self, seed: int, most: int) -> list[int]:
        rng = np.random.default_rng(seed)
        return rng.integers(0, 3, self.unit * int(rng.integers(1, most))).tolist()

    def decide(self, req: Req, length: int) -> np.ndarray:
        """Blocks of random length, so that whole pages, parts of pages and single tokens are all asked for."""
        free = self.world.allocator.available_size() + self.world.cache.evictable_size()
        if free * RUNS_SHORT // 2 < self.world.size:
            self.loud()  # an event may take what others have left: the pool runs short
        seed = self.appetite.get(req.rid, 0)
        if seed % 3 == 0:
            return NO_POSITIONS
        rng = np.random.default_rng((seed, length))
        block = int(rng.choice([1, 3, self.page_size, 4 * self.page_size]))
        chosen = np.repeat(rng.random(length // block + 1) < rng.choice([0.1, 0.5, 0.9]), block)[:length]
        if chosen.any():
            self.disturb(req)  # what a parallel call drops is dropped for the whole session
        return np.flatnonzero(chosen)

    def submit(self, session, tokens, scope, seed, expected: int | None = None) -> None:
        if len(tokens) > self.size * self.page_size // 3 or len(self.waiting) > 3:
            return
        req = self.world.request(tokens, session, new=1 + seed % 6, extra_key=scope[0], salt=scope[1])
        self.appetite[req.rid] = seed
        self.opened.add(session or req.rid)  # a request without a session is one of its own
        self.texts[scope, tuple(tokens)] = tokens
        if not self.world.admit(req):
            assert self.world.running or self.world.prefilling, f"{len(tokens)} tokens never fit an idle pool"
            self.waiting.append(req)
            return
        hit = self.world.found[req.rid]
        if expected is not None:
            assert hit >= expected, f"hit {hit}, expected {expected}"
            TOTALS["full hits"] += 1
        self.disturb(req)
        if req.finished():
            self.finished(req)

    def loud(self, session: str | None = None) -> None:
        """From now on finished turns, all or those of one session, may have lost something."""
        for turn in self.turns:
            turn.quiet &= session is not None and turn.session != session

    def disturb(self, req: Req) -> None:
        """The request's session has moved on: its earlier turns may have given way."""
        if session_of(req) is not None:
            self.loud(session_of(req))

    def crowd(self, req: Req) -> None:
        """Only so many texts of a session are kept: enough branches at once push its finished turn out."""
        session = session_of(req)
        if sum(session_of(other) == session for other in self.world.running + self.world.prefilling) >= BRANCHES:
            self.disturb(req)

    def finished(self, req: Req) -> None:
        session = session_of(req)
        self.disturb(req)
        tokens = list(req.origin_input_ids + req.output_ids)
        self.texts[(req.extra_key, req.cache_salt), tuple(tokens)] = tokens
        self.turns = [*self.turns[-11:], Turn(session, tokens, (req.extra_key, req.cache_salt))]

    @invariant()
    def everything_holds(self) -> None:
        TOTALS["steps"] += 1
        check_world(self.world)
        for (scope, _), tokens in list(self.texts.items())[-24:]:
            check_text(self.world, tokens, *scope)
        for req in self.world.running + self.world.prefilling:
            holes = self.world.holes_of(req)
            before = self.holes.get((req.rid, req.retraction_count), NO_POSITIONS)
            assert np.isin(before, holes).all(), "a dropped position came back"
            self.holes[req.rid, req.retraction_count] = holes

    def teardown(self) -> None:
        for req in self.world.running + self.world.prefilling:
            self.world.abort(req)
        TOTALS["sessions"] += len(self.opened)
        done = ("events", "dropped", "freed", "namespaces_evicted")
        TOTALS.update({name: count for name, count in self.world.cache.stats().items() if name in done})
        drain(self.world)
        assert self.world.allocator.available_size() == self.world.size
        assert self.world.cache.audit() == []
