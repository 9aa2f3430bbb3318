"""What a chat template writes around messages, found out by rendering small conversations with it.

Each probe is rendered twice with different contents, tool names, arguments and call ids; what differs between the two
is content, what is equal belongs to the template. Templates that refuse a role or an order raise; they are asked for
others.
"""

import itertools
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

Role = Literal["system", "user", "assistant", "tool"]

# One letter a message: system, user, assistant, (assistant with a tool) call, tool.
ROLES: dict[str, Role] = {"s": "system", "u": "user", "a": "assistant", "c": "assistant", "t": "tool"}
CONVERSATIONS = (
    *("s", "u", "su", "ua", "sua", "uau", "suau", "uaua", "uu", "uaa", "us", "uas", "ss", "sa", "st", "uts"),
    *("uc", "suc", "uct", "suct", "uctt", "ucta", "uctta", "uctc", "uctctt", "uctau", "uctu", "ucttu"),
    *("ut", "uat", "uatt", "uata", "uatu"),
)


# What most templates are made of: `<|im_start|>`, `</s>`, `[INST]`; one token in most tokenizers, but not in all.
TAG = re.compile(r"<[^<>\s]+>|\[[^\[\]\s]+\]")


@dataclass(frozen=True)
class _Filling:
    """The variable parts of a probe. Call ids have nine characters, since Mistral's templates insist on it."""

    word: str
    tool: str
    call_id: str

    def marker(self, index: int) -> str:
        return f"{self.word}{chr(ord('A') + index)}{self.word}"


FILLINGS = (_Filling("zebra", "probe", "a1b2c3d4e"), _Filling("Quill", "lookup", "z9y8x7w6v"))


@dataclass(frozen=True)
class Probe:
    """A conversation the template accepts.

    Attributes:
        kinds: its messages, letters of `ROLES`.
        pieces: for each filling the text before the first content, between two contents, and after the last one:
            `len(kinds) + 1` strings.
    """

    kinds: str
    pieces: tuple[tuple[str, ...], ...]


@dataclass(frozen=True)
class Gap:
    """The text before a content: how the message before it ends and how its own begins.

    Attributes:
        previous, kind: letters of `ROLES`; `previous` is empty where the prompt begins.
        texts: the text, for each filling.
        footers: how many characters of it belong to the message before, for each filling. So does white space between
            the two.
    """

    previous: str
    kind: str
    texts: tuple[str, ...]
    footers: tuple[int, ...]

    @property
    def has_header(self) -> bool:
        """Whether anything is written that announces the content as a new message."""
        return all(footer < len(text) for text, footer in zip(self.texts, self.footers, strict=True))

    @property
    def is_silent(self) -> bool:
        """Whether nothing but white space parts the two messages: they are one to the model."""
        return not any(text.strip() for text in self.texts)


def render_probes(render: Callable[[list[dict[str, Any]]], str]) -> tuple[list[Probe], list[str]]:
    """All probes the template accepts, and why it refused the others."""
    probes: list[Probe] = []
    refusals: list[str] = []
    for kinds in CONVERSATIONS:
        # Some templates want arguments as a mapping, some as JSON text; some write calls only where content is None.
        forms = itertools.product((False, True), ("", None)) if "c" in kinds else [(False, None)]
        for as_text, call_content in forms:
            try:
                texts = [render(_conversation(kinds, filling, as_text, call_content)) for filling in FILLINGS]
            except Exception as error:  # noqa: BLE001 - template code raises what it likes; a refusal is an answer
                refusals.append(f"{kinds}: {error}")
                continue
            pieces = [
                _cut(text, [f.marker(i) for i in range(len(kinds))]) for text, f in zip(texts, FILLINGS, strict=True)
            ]
            complete = tuple(piece for piece in pieces if piece is not None)
            if len(complete) == len(FILLINGS):
                probes.append(Probe(kinds, complete))
                break
            refusals.append(f"{kinds}: the contents do not all appear once and in order")
    return probes, refusals


def find_gaps(probes: Sequence[Probe]) -> list[Gap]:
    """Every gap before a content, parted into the end of one message and the beginning of the next.

    A message ends as it does at the end of a conversation. Where that is not known (before the first message, or
    because the template never lets a kind stand last), it ends where a header known from elsewhere begins.
    """
    tails: dict[str, set[tuple[str, ...]]] = {}
    texts: set[tuple[str, str, tuple[str, ...]]] = set()
    for probe in probes:
        tails.setdefault(probe.kinds[-1], set()).add(_column(probe, -1))
        pairs = itertools.pairwise(["", *probe.kinds])
        texts |= {(previous, kind, _column(probe, i)) for i, (previous, kind) in enumerate(pairs)}
    parted = [_after_tail(*gap, tails[gap[0]]) for gap in sorted(texts) if gap[0] in tails]
    headers = {
        (gap.kind, text[footer:])
        for gap in parted
        if gap.has_header
        for text, footer in zip(gap.texts, gap.footers, strict=True)
    }
    return parted + [_before_header(*gap, headers) for gap in sorted(texts) if gap[0] not in tails]


def _after_tail(previous: str, kind: str, texts: tuple[str, ...], tails: set[tuple[str, ...]]) -> Gap:
    shared = (max(_common_length(text, tail[i]) for tail in tails) for i, text in enumerate(texts))
    footers = (_past_space(text, _before_tag(text, n)) for text, n in zip(texts, shared, strict=True))
    return Gap(previous, kind, texts, tuple(footers))


def _before_header(previous: str, kind: str, texts: tuple[str, ...], headers: set[tuple[str, str]]) -> Gap:
    known = [header for header_kind, header in headers if header_kind == kind]
    ends = (max((len(header) for header in known if text.endswith(header)), default=len(text)) for text in texts)
    footers = (_past_space(text, len(text) - n) for text, n in zip(texts, ends, strict=True))
    return Gap(previous, kind, texts, tuple(footers))


def _conversation(kinds: str, filling: _Filling, as_text: bool, call_content: str | None) -> list[dict[str, Any]]:
    return [_message(kind, filling, filling.marker(i), as_text, call_content) for i, kind in enumerate(kinds)]


def _message(kind: str, filling: _Filling, marker: str, as_text: bool, call_content: str | None) -> dict[str, Any]:
    if kind == "c":
        arguments = f'{{"q": "{marker}"}}' if as_text else {"q": marker}
        function = {"name": filling.tool, "arguments": arguments}
        call = {"id": filling.call_id, "type": "function", "function": function}
        return {"role": "assistant", "content": call_content, "tool_calls": [call]}
    message = {"role": ROLES[kind], "content": marker}
    return message | ({"name": filling.tool, "tool_call_id": filling.call_id} if kind == "t" else {})


def _cut(text: str, markers: list[str]) -> tuple[str, ...] | None:
    """The text around the markers, or None unless each appears once and in order."""
    pieces: list[str] = []
    rest = text
    for marker in markers:
        if text.count(marker) != 1 or marker not in rest:
            return None
        before, _, rest = rest.partition(marker)
        pieces.append(before)
    return (*pieces, rest)


def _column(probe: Probe, index: int) -> tuple[str, ...]:
    return tuple(piece[index] for piece in probe.pieces)


def _common_length(left: str, right: str) -> int:
    pairs = enumerate(zip(left, right, strict=False))
    return next((i for i, (a, b) in pairs if a != b), min(len(left), len(right)))


def _before_tag(text: str, start: int) -> int:
    """`start`, or where the tag begins that it cuts off from what follows.

    `<|end|>` and `<|tool|>` share two characters, and no more. Where a template closes every text with a generation
    prompt, what it shares with a gap ends behind the `<|im_start|>` that belongs to the role.
    """
    cuts_role = text[start:][:1].isalpha()
    return next((tag.start() for tag in TAG.finditer(text) if tag.start() < start < tag.end() + cuts_role), start)


def _past_space(text: str, start: int) -> int:
    return len(text) - len(text[start:].lstrip())
