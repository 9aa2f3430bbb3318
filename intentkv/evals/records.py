"""Tool outputs: a few facts, each said once, among natural sentences that nobody asks about."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from intentkv.evals.draws import Fresh, amount, code, person

DETAIL_SHARE = 0.15  # of filler sentences: names, amounts and codes of their own, as unpredictable as a fact


@dataclass(frozen=True)
class Family:
    """A world that sessions are made in.

    Attributes:
        system: the system prompt.
        tool, titles: the tool that loads records, and the kinds of record ("morning intake ledger").
        action: the tool that takes a fact as its argument.
        labels, objects: what facts are about, "the `door code` of the `side gate`"; their values are numbers. A session
            uses an object at most once, and a label again only when it has used all: SmolLM2 mixes up facts that share one.
        openings, actions, reasons, closings: parts that a sentence of filler is made of.
        details: sentences of filler with `{person}`, `{amount}` and `{code}`.
        style: how a record is written: running text, a list, a log with times, or bare lines.
        statements: what a fact is told in, with `{what}` and `{value}`; in turn.
        filler: the form of a sentence of filler, with a place for each kind of part that there is, in order.
        filler_times: sentences of filler for each that is asked for, where they are short.
        noise: makes one line that is surprising and useless, such as a hash.
        noise_lines: how many of them a record has.
    """

    name: str
    system: str
    tool: str
    titles: tuple[str, ...]
    action: str
    labels: tuple[str, ...]
    objects: tuple[str, ...]
    openings: tuple[str, ...]
    actions: tuple[str, ...]
    reasons: tuple[str, ...]
    closings: tuple[str, ...]
    details: tuple[str, ...]
    style: Literal["prose", "list", "log", "lines"]
    statements: tuple[str, ...] = ("The {what} is {value}.",)
    filler: str = "{} {} {}, {}."
    filler_times: int = 1
    noise: Callable[[random.Random], str] | None = None
    noise_lines: int = 0


@dataclass(frozen=True)
class Fact:
    """`what` ("door code of the side gate") has `value`; turn `turn` of its path shows it (from 1)."""

    what: str
    value: str
    turn: int

    @property
    def question(self) -> str:
        return f"What is the {self.what}?"


def record(family: Family, number: int, facts: list[Fact], filler: int, draw: random.Random, fresh: Fresh) -> str:
    """The text of record `number` (from 1): its title, then `facts` among `filler` sentences, in an order drawn from `draw`."""
    sentences = _filler(family, filler * family.filler_times, draw, fresh)
    for _ in range(family.noise_lines if family.noise else 0):
        assert family.noise is not None
        sentences.insert(draw.randrange(1, len(sentences) + 1), family.noise(draw))
    for place, fact in enumerate(facts, start=(number - 1) * len(facts)):
        statement = family.statements[place % len(family.statements)].format(what=fact.what, value=fact.value)
        sentences.insert(draw.randrange(1, len(sentences)), statement)
    heading = title(family, number).capitalize()
    if family.style == "prose":
        return f"{heading}. " + " ".join(sentences)
    if family.style == "list":
        return f"{heading}:\n" + "\n".join(f"- {sentence}" for sentence in sentences)
    if family.style == "lines":
        return f"{heading}:\n" + "\n".join(sentences)
    minute = draw.randrange(60, 600)
    lines = []
    for sentence in sentences:
        minute += draw.randrange(1, 20)
        lines.append(f"[{minute // 60:02d}:{minute % 60:02d}] {sentence}")
    return f"{heading}:\n" + "\n".join(lines)


def title(family: Family, number: int) -> str:
    """What record `number` (from 1) is called."""
    return family.titles[(number - 1) % len(family.titles)]


def _filler(family: Family, count: int, draw: random.Random, fresh: Fresh) -> list[str]:
    """`count` sentences of which no two share more than a part; each part comes up about equally often."""
    parts = (family.openings, family.actions, family.reasons, family.closings)
    decks = [itertools.cycle(draw.sample(part, len(part))) for part in parts if part]
    details = itertools.cycle(draw.sample(family.details, len(family.details)))
    sentences = []
    for _ in range(count):
        if draw.random() < DETAIL_SHARE:
            values = {"person": fresh(person), "amount": fresh(amount), "code": fresh(code)}
            sentences.append(next(details).format(**values))
        else:
            sentences.append(family.filler.format(*(next(deck) for deck in decks)))
    return sentences
