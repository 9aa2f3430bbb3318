"""Generated agent sessions: an agent loads records through a tool, and is asked about them turns later.

A session is fixed by (family, seed). Which facts are asked, and when, is drawn from the seed, so nothing in a record tells
what will be needed; more than half of the facts that the records hold are never asked for.
"""

import itertools
import random
from collections.abc import Callable
from dataclasses import dataclass

Message = dict[str, str]  # role, content


@dataclass(frozen=True)
class Kind:
    """Something that has a value in this world: `what` ("code for the side gate"), and how an unpredictable one is drawn."""

    what: str
    draw: Callable[[random.Random], str]


@dataclass(frozen=True)
class Family:
    """A world that sessions are made in.

    Attributes:
        system: the system prompt.
        tool, titles: the tool's name, and the kinds of record it loads ("morning intake ledger").
        kinds: what facts are about; each comes up at most once in a session.
        openings, actions, reasons, closings: parts that a sentence of filler is made of.
    """

    name: str
    system: str
    tool: str
    titles: tuple[str, ...]
    kinds: tuple[Kind, ...]
    openings: tuple[str, ...]
    actions: tuple[str, ...]
    reasons: tuple[str, ...]
    closings: tuple[str, ...]


@dataclass(frozen=True)
class Fact:
    """`what` has `value`; a record shows it in turn `turn` (from 1)."""

    what: str
    value: str
    turn: int

    @property
    def statement(self) -> str:
        """As a record puts it: said and confirmed, because SmolLM2 rarely finds what was said once 3k tokens ago."""
        return f"The {self.what} is {self.value}. To confirm, the {self.what} is {self.value}."

    @property
    def question(self) -> str:
        return f"What is the {self.what}?"


@dataclass(frozen=True)
class Turn:
    """Messages that the agent adds before it asks the model, ending with the user's question, and what is right.

    Attributes:
        messages: the load of a record (user, assistant with the call, tool) if this turn loads one; then the question.
        expected: what a right answer contains.
        age: turns since the answer was shown; 0 in the turn that loads it.
        asked_before: the same question was asked in an earlier turn.
    """

    messages: tuple[Message, ...]
    expected: str
    age: int
    asked_before: bool


@dataclass(frozen=True)
class Session:
    """A system prompt and the turns after it. `name` is family and seed."""

    name: str
    system: str
    turns: tuple[Turn, ...]


def make_session(
    family: Family, seed: int, *, records: int = 5, late: int = 5, facts: int = 4, filler: int = 14
) -> Session:
    """A session of `records` turns that each load a record and ask, then `late` turns that only ask.

    A record holds `facts` facts among `filler` sentences (about 600 tokens of SmolLM2 with the defaults, 3k and more in all). The first turn
    asks about its own record, every later one about an earlier record; each fact is asked once, but for one late
    question that repeats the first.
    """
    draw = random.Random(f"{family.name} {seed}")
    kinds = draw.sample(family.kinds, records * facts)
    told: list[Fact] = []
    asked: list[Fact] = []
    turns: list[Turn] = []
    repeat_in = draw.randrange(records + 2, records + late + 1)
    for number in range(1, records + late + 1):
        messages: list[Message] = []
        if number <= records:
            new = [Fact(kind.what, kind.draw(draw), number) for kind in (kinds.pop() for _ in range(facts))]
            messages += _load(family, number, new, filler, draw)
            told += new
        open_facts = [f for f in told if f not in asked and (f.turn < number or number == 1)]
        fact = asked[0] if number == repeat_in else draw.choice(open_facts)
        messages.append({"role": "user", "content": fact.question})
        turns.append(Turn(tuple(messages), fact.value, number - fact.turn, fact in asked))
        asked.append(fact)
    return Session(f"{family.name}-{seed}", family.system, tuple(turns))


def is_right(answer: str, expected: str) -> bool:
    """Whether `answer` contains `expected`, whatever the case."""
    return expected.lower() in answer.lower()


def _load(family: Family, number: int, facts: list[Fact], filler: int, draw: random.Random) -> list[Message]:
    """The three messages by which record `number` enters the session: request, call, tool output."""
    title = family.titles[(number - 1) % len(family.titles)]
    sentences = _filler(family, filler, draw)
    for fact in facts:
        sentences.insert(draw.randrange(1, len(sentences)), fact.statement)
    record = f"{title.capitalize()}, entry {draw.randrange(1000, 9999)}. " + " ".join(sentences)
    return [
        {"role": "user", "content": f"Please load the {title}."},
        {"role": "assistant", "content": f'{family.tool}("{title}")'},
        {"role": "tool", "content": record},
    ]


def _filler(family: Family, count: int, draw: random.Random) -> list[str]:
    """`count` sentences of which no two share more than a part; each part comes up about equally often."""
    parts = (family.openings, family.actions, family.reasons, family.closings)
    decks = [itertools.cycle(draw.sample(part, len(part))) for part in parts]
    return ["{} {} {}, {}.".format(*(next(deck) for deck in decks)) for _ in range(count)]


def code(draw: random.Random) -> str:
    """Two letters and three digits: `KX-402`."""
    letters = "".join(draw.choice("ABCDEFGHJKLMNPQRSTVWXYZ") for _ in range(2))
    return f"{letters}-{draw.randrange(100, 1000)}"


def amount(draw: random.Random) -> str:
    """Whole dollars: `$183`."""
    return f"${draw.randrange(20, 1000)}"


def person(draw: random.Random) -> str:
    """A surname out of thirty."""
    return draw.choice(SURNAMES)


def digits(draw: random.Random) -> str:
    """Four digits: an extension, a combination."""
    return str(draw.randrange(1000, 10000))


SURNAMES = (
    *("Abernathy", "Bellweather", "Castellan", "Drummond", "Eastwick", "Farrow", "Galloway", "Hathersage", "Ingleby"),
    *("Jarrow", "Kingsley", "Lockhart", "Merriman", "Northcott", "Okafor", "Pemberton", "Quintero", "Ravenhill"),
    *("Tremaine", "Underwood", "Vandermeer", "Whitlock", "Yarborough", "Zimmerman", "Ashgrove", "Blackwood"),
    *("Cranfield", "Dunmore", "Ellsworth", "Fairbanks"),
)
