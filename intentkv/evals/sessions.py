"""Generated agent sessions: an agent loads records through a tool, and is asked about them turns later.

A session is fixed by (family, seed). Which facts are asked, and when, is drawn from the seed, so nothing in a record tells
what will be needed; about half of the facts that the records hold are never asked for.
"""

from __future__ import annotations

import itertools
import random
import re
from dataclasses import dataclass

from intentkv.evals.draws import Fresh, digits
from intentkv.evals.records import Fact, Family, record, title

Message = dict[str, str]  # role, content
ARGUMENT_SHARE = 0.25  # of the questions: they want a tool call with the fact as its argument
REPEATS = 2  # late questions that were asked before


@dataclass(frozen=True)
class Turn:
    """Messages that the agent adds before it asks the model, ending with the user's question, and what is right.

    Attributes:
        messages: the load of a record (user, assistant with the call, tool) if this turn loads one; then the question.
        expected: what a right answer contains.
        age: turns since the answer was shown; 0 in the turn that loads it.
        asked_before: the same fact was asked for in an earlier turn.
        as_argument: the question wants a tool call with the fact as its argument. A model that says the fact instead,
            as SmolLM2 does, is right too: the value has to be there literally either way.
        branch: 0 is the main agent. Another number is a sub-agent, whose first turn goes on from the history that the
            main agent has at this place in the session; the main agent never sees its turns.
        rewritten: before the next turn the client rewrites the answer that this turn got (template drift).
        recorded: the history goes on with this answer, whatever the model's was; None for the model's.
    """

    messages: tuple[Message, ...]
    expected: str
    age: int
    asked_before: bool
    as_argument: bool = False
    branch: int = 0
    rewritten: bool = False
    recorded: str | None = None


@dataclass(frozen=True)
class Session:
    """A system prompt (or "") and the turns after it, in the order they are played. `name` is family and seed.

    An answer ends with `stop` or after `answer_tokens` tokens. By default it is one sentence: SmolLM2 says it again and
    again, and later copies that. `regex` is what an SGLang server lets it be, and ends it with.
    """

    name: str
    system: str
    turns: tuple[Turn, ...]
    answer_tokens: int = 24
    stop: str | None = "."
    regex: str | None = None


class Transcript:
    """The histories that the client of a session holds, one a branch."""

    def __init__(self, session: Session) -> None:
        main: list[Message] = [{"role": "system", "content": session.system}] if session.system else []
        self._branches: dict[int, list[Message]] = {0: main}

    def ask(self, turn: Turn) -> list[Message]:
        """The whole prompt of `turn`; its messages become part of its branch."""
        history = self._branches.setdefault(turn.branch, list(self._branches[0]))
        history += turn.messages
        return list(history)

    def answered(self, turn: Turn, answer: str) -> None:
        """Adds the answer to `turn`, right or wrong, as the client keeps it.

        A rewritten one ends in a line break, as some clients end every message; its words stay, which SmolLM2 copies.
        """
        kept = answer if turn.recorded is None else turn.recorded
        if turn.rewritten:
            kept = f"{kept.rstrip('. ')}\n"
        self._branches[turn.branch].append({"role": "assistant", "content": kept})


def make_session(
    family: Family,
    seed: int,
    *,
    records: int = 4,
    late: int = 4,
    facts: int = 3,
    filler: int = 12,
    forks: int = 0,
    rewrites: int = 0,
) -> Session:
    """A session of `records` turns that each load a record and ask, then `late` turns that only ask.

    A record holds `facts` facts among `filler` sentences (400 to 650 tokens of SmolLM2 with the defaults). The
    first turn asks about its own record, every later one about an earlier record. Each fact is asked for once, but for
    two late questions that repeat earlier ones.

    Args:
        forks: sub-agents, each of two turns: it loads a record of its own and asks for a fact of the main agent's, then
            for another.
        rewrites: answers of the main agent that the client rewrites before the next turn.

    Raises:
        ValueError: the family has too few objects for so many facts.
    """
    needed = (records + forks) * facts
    if needed > len(family.objects):
        raise ValueError(
            f"{family.name} has {len(family.objects)} objects, but {needed} facts are asked for: make fewer"
        )
    draw = random.Random(f"{family.name} {seed}")
    fresh = Fresh(draw)
    labels = itertools.cycle(draw.sample(family.labels, len(family.labels)))
    things = draw.sample(family.objects, needed)
    subjects = [f"{label} of the {thing}" for label, thing in zip(labels, things, strict=False)]
    count = records + late
    repeat_in = draw.sample(range(records + 1, count + 1), min(REPEATS, late))
    fork_after = sorted(draw.sample(range(2, count), min(forks, count - 2)))
    rewrite_in = draw.sample(range(1, count), min(rewrites, count - 1))
    told: list[Fact] = []
    asked: list[Fact] = []  # by the main agent
    taken: list[Fact] = []  # by a sub-agent
    turns: list[Turn] = []

    def load(number: int, path_turn: int) -> tuple[list[Message], list[Fact]]:
        new = [Fact(subjects.pop(), fresh(digits), path_turn) for _ in range(facts)]
        name = title(family, number)
        return [
            {"role": "user", "content": f"Please load the {name}."},
            {"role": "assistant", "content": f'{family.tool}("{name}")'},
            {"role": "tool", "content": record(family, number, new, filler, draw, fresh)},
        ], new

    def ask(messages: list[Message], path_turn: int, branch: int, again: bool = False) -> None:
        new = [f for f in told if f not in asked + taken and (f.turn < path_turn or path_turn == 1)]
        fact = draw.choice(asked if again or not new else new)
        as_argument = draw.random() < ARGUMENT_SHARE
        question = f"{fact.question} We need it for {family.action}." if as_argument else fact.question
        turns.append(
            Turn(
                messages=(*messages, {"role": "user", "content": question}),
                expected=fact.value,
                age=path_turn - fact.turn,
                asked_before=fact in asked,
                as_argument=as_argument,
                branch=branch,
                rewritten=branch == 0 and path_turn in rewrite_in,
            )
        )
        (taken if branch else asked).append(fact)

    for number in range(1, count + 1):
        messages: list[Message] = []
        if number <= records:
            messages, new = load(number, number)
            told += new
        ask(messages, number, 0, again=number in repeat_in)
        if number in fork_after:
            branch = fork_after.index(number) + 1
            messages, _ = load(records + branch, number + 1)
            ask(messages, number + 1, branch)
            ask([], number + 2, branch)
    return Session(f"{family.name}-{seed}", family.system, tuple(turns))


def is_right(answer: str, expected: str) -> bool:
    """Whether `answer` contains `expected` as a whole, not as a part of another number or word; case does not matter."""
    plain = re.sub(r"(?<=\d),(?=\d{3})", "", answer)  # 4,417 is 4417
    return re.search(rf"(?<![\w-]){re.escape(expected)}(?![\w-])", plain, re.IGNORECASE) is not None
