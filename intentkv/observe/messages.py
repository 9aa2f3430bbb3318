"""Where the messages of a prompt begin and end, by the tokenizer's own chat template."""

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from intentkv.observe import patterns
from intentkv.observe.patterns import Tokens
from intentkv.observe.probes import ROLES, Gap, Role, find_gaps, render_probes


@dataclass(frozen=True)
class Message:
    """One message of a prompt: tokens `[start, end)`, its header and footer included."""

    role: Role
    start: int
    end: int


@dataclass(frozen=True)
class Boundary:
    """Token ids that tell where a message begins.

    Attributes:
        tokens: the ids to look for.
        role: of the message that begins.
        after: False if `tokens` are the header of that message; True if they close the one before, as `[/INST]` does,
            so that it begins behind them.
    """

    tokens: Tokens
    role: Role
    after: bool


@dataclass(frozen=True)
class MessageFormat:
    """How a chat template parts its messages, as token ids.

    A boundary counts only behind a role that it was seen to follow, so that quoted text rarely misleads. Contents that
    quote a whole header do mislead where the header is plain text (`USER:`), and where the tokenizer reads special
    tokens in contents as such.

    Attributes:
        first: boundaries that may begin the first message, longest first.
        following: role -> boundaries that may end a message of this role, longest first.
        folds_system: the template writes the system message into the first user message, without a boundary.
    """

    first: tuple[Boundary, ...]
    following: Mapping[str, tuple[Boundary, ...]]
    folds_system: bool

    @classmethod
    def from_chat_template(
        cls, render: Callable[[list[dict[str, Any]]], str], encode: Callable[[str], list[int]]
    ) -> "MessageFormat":
        """Derive the format from a tokenizer.

        Args:
            render: messages (role, content, and for tools the OpenAI fields) -> prompt text, without a generation
                prompt. May raise for conversations the template refuses.
            encode: text -> ids, special tokens recognised and none added.

        Raises:
            ValueError: no boundary of a user message could be found; says what the template refused.
        """
        probes, refusals = render_probes(render)
        gaps = find_gaps(probes)
        folds_system = any(gap.previous == "s" and gap.is_silent for gap in gaps)
        # Where the system message is folded in, what precedes it is the header of the user message.
        own = [gap for gap in gaps if not gap.is_silent and not (folds_system and gap.kind == "s")]
        found = _boundaries(own, encode)
        first = found[""] | found["system"] | {b for b in found["assistant"] if b.role == "user"}
        if not any(b.role == "user" for b in first):
            raise ValueError(
                "chat template: expected a boundary before user messages, found none; "
                f"probes that failed: {'; '.join(refusals) or 'none'}"
            )
        return cls(
            first=_longest_first(first),
            following={role: _longest_first(found[role]) for role in found},
            folds_system=folds_system,
        )

    def messages(self, ids: Sequence[int] | NDArray[np.int64]) -> list[Message]:
        """The messages of a prompt, in order; each ends where the next begins, the last one at the end of `ids`.

        What precedes the first user or assistant message (BOS, a system message, one that the template puts in by
        itself) is one system message. A generation prompt is an assistant message of a few tokens. Empty if no user,
        assistant or tool message begins in `ids`: then it is no chat prompt, though it may begin with BOS.
        """
        told = self._starts(np.asarray(ids).tolist())
        others = list(itertools.dropwhile(lambda start: start[1] == "system", told))
        if not others:
            return []
        starts: list[tuple[int, Role]] = [(0, "system"), *others]
        ends = [start for start, _ in starts[1:]] + [len(ids)]
        return [Message(role, start, end) for (start, role), end in zip(starts, ends, strict=True) if start < end]

    def _starts(self, ids: list[int]) -> Iterator[tuple[int, Role]]:
        """(start, role) of each message that a boundary tells."""
        known = self.first
        at = 0
        for hit in self._hits(ids):
            match = next((b for b in known if tuple(ids[hit : hit + len(b.tokens)]) == b.tokens), None)
            if match is not None and hit >= at:
                at = hit + len(match.tokens)
                yield (at if match.after else hit), match.role
                known = self.following[match.role]

    def _hits(self, ids: list[int]) -> list[int]:
        """Positions where any boundary may begin."""
        every = {*self.first, *(b for known in self.following.values() for b in known)}
        hits: list[int] = np.flatnonzero(np.isin(ids, list({b.tokens[0] for b in every}))).tolist()
        return hits


def _boundaries(gaps: Sequence[Gap], encode: Callable[[str], list[int]]) -> dict[str, set[Boundary]]:
    """Role -> the boundaries that may end a message of this role; under "", those that may end the empty prompt."""
    specials = patterns.special_ids((text for gap in gaps for text in gap.texts), encode)
    found: dict[str, set[Boundary]] = {"": set(), **{role: set() for role in ROLES.values()}}
    for gap in gaps:
        variants = [[gap]]
        if gap.kind == "c":
            # What is special to a call is content; what it shares with a plain answer of the assistant is the header.
            variants = [[gap, other] for other in gaps if other.kind == "a" and other.has_header and gap.has_header]
        for variant in variants:
            role, after = ROLES[gap.kind], not gap.has_header
            if after and role != "assistant":
                continue  # only the assistant speaks unannounced; anything else is text of the same message
            for tokens in patterns.footers(gap, encode) if after else patterns.headers(variant, encode):
                if _is_whole(variant) or specials.intersection(tokens):
                    found[ROLES.get(gap.previous, "")].add(Boundary(tokens, role, after))
    return found


def _is_whole(gaps: Sequence[Gap]) -> bool:
    """Whether the texts at the boundary are the same for all contents: a part of one may be too common to trust."""
    cuts = [(text[:n], text[n:]) for gap in gaps for text, n in zip(gap.texts, gap.footers, strict=True)]
    return len({header if gaps[0].has_header else footer for footer, header in cuts}) == 1


def _longest_first(boundaries: set[Boundary]) -> tuple[Boundary, ...]:
    # Longest, since a tool message may be written as a user message with a tag. Of roles that a template writes alike,
    # the one that every conversation has.
    rank = ("user", "assistant", "system", "tool").index
    return tuple(sorted(boundaries, key=lambda b: (-len(b.tokens), b.tokens, rank(b.role))))
