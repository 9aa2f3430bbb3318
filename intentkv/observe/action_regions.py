"""Action regions: where a generated answer is a tool call, found while its tokens come in (ActKV, section 4).

A detector is an automaton over characters, so it gives the same regions however the text was cut: whole, token by
token, or in the middle of a marker. What decides is the text so far and nothing else.

A marker that is only quoted opens and closes nothing: an opening marker directly behind a quotation mark or without the
beginning of a call behind it, and a closing marker inside a JSON string.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final, Literal

from intentkv.observe.call_templates import markers_of

_QUOTES: Final = "\"'`"
_MAX_HEADER: Final = 512  # characters; a Harmony header is a few dozen


@dataclass(frozen=True)
class Edge:
    """A region begins or ends. `at`: characters of the answer up to and including the one that decided it."""

    kind: Literal["enter", "leave"]
    at: int


class Detector(ABC):
    """Finds the action regions of one answer. `inside` says whether the text so far ends in one."""

    def __init__(self) -> None:
        self.inside = False
        self._at = 0
        self._tail = ""  # what was read last, long enough for any marker and the character before it
        self._edges: list[Edge] = []

    def feed(self, text: str) -> list[Edge]:
        """Read on; returns the edges that `text` decided, in order."""
        self._edges = []
        for char in text:
            self._at += 1
            self._tail = self._tail[-63:] + char
            self._read(char)
        return self._edges

    def finish(self) -> list[Edge]:
        """The answer has ended: an open region ends with it."""
        self._edges = []
        if self.inside:
            self._leave()
        return self._edges

    @abstractmethod
    def _read(self, char: str) -> None: ...

    def _ends_with(self, marker: str) -> bool:
        return self._tail.endswith(marker)

    def _quoted(self, marker: str) -> bool:
        """Whether the marker just read stands directly behind a quotation mark."""
        before = self._tail[: -len(marker)][-1:]
        return before != "" and before in _QUOTES

    def _enter(self) -> None:
        self.inside = True
        self._edges.append(Edge("enter", self._at))

    def _leave(self) -> None:
        self.inside = False
        self._edges.append(Edge("leave", self._at))


class _Body:
    """How far into a call's body the text is: in a JSON string or not, and how deep in brackets."""

    def __init__(self) -> None:
        self.is_json: bool | None = None  # None until the first character that is no white space
        self.in_string = False
        self.depth = 0
        self._escaped = False

    def read(self, char: str) -> None:
        if self.is_json is None and not char.isspace():
            self.is_json = char in "{["
        if not self.is_json:
            return
        if self.in_string:
            # JSON has no line break inside a string, so a broken string ends with its line at the latest.
            self.in_string = char != "\n" and (self._escaped or char != '"')
            self._escaped = char == "\\" and not self._escaped
        elif char == '"':
            self.in_string, self._escaped = True, False
        else:
            self.depth += (char in "{[") - (char in "}]")


class MarkerDetector(Detector):
    """A region between two literal markers.

    Args:
        opening, closing: the markers.
        begins: how a call may begin behind the opening marker and white space; anything else is text about calls. The
            region begins when this was read. Empty: it begins with the marker.
    """

    def __init__(self, opening: str, closing: str, begins: tuple[str, ...] = ()) -> None:
        super().__init__()
        self._opening, self._closing, self._begins = opening, closing, begins
        self._body: _Body | None = None  # from the opening marker on
        self._lead = ""  # what followed the opening marker, until it is known whether a call does

    def _read(self, char: str) -> None:
        if self._body is not None and not self.inside:
            self._confirm(char)
        elif self._body is not None:
            self._body.read(char)
            if not self._body.in_string and self._ends_with(self._closing):
                self._body = None
                self._leave()
        if self._ends_with(self._opening) and not self._quoted(self._opening):
            self._open()

    def _open(self) -> None:
        if self._body is not None and self._body.in_string:
            return
        if self.inside:
            self._leave()  # a call that was never closed ends where the next begins
        self._body, self._lead = _Body(), ""
        if not self._begins:
            self._enter()

    def _confirm(self, char: str) -> None:
        assert self._body is not None
        if char.isspace() and not self._lead:
            return
        self._lead += char
        self._body.read(char)
        if self._lead in self._begins:
            self._enter()
        elif not any(begin.startswith(self._lead) for begin in self._begins):
            self._body = None


class HarmonyDetector(Detector):
    """Messages of the commentary and analysis channels that have a recipient, as gpt-oss writes calls.

    The answer begins inside the header that the prompt has opened with `<|start|>assistant`. A header that names a
    recipient (`to=functions.search`) makes its message a call, from the name on; `<|call|>` or `<|return|>` ends it,
    and so does any other end of message.
    """

    _ENDS: Final = ("<|call|>", "<|return|>", "<|end|>")

    def __init__(self) -> None:
        super().__init__()
        self._header: str | None = ""  # what was read of the header, or None outside of one
        self._body: _Body | None = None

    def _read(self, char: str) -> None:
        if self._header is not None:
            self._read_header(char)
        elif self._body is not None:
            self._body.read(char)
            for end in self._ENDS:
                if self._ends_with(end) and not self._body.in_string and (self.inside or not self._quoted(end)):
                    self._body = None
                    if self.inside:
                        self._leave()
                    break
        elif self._ends_with("<|start|>") or self._ends_with("<|channel|>"):
            self._header = ""

    def _read_header(self, char: str) -> None:
        assert self._header is not None
        self._header += char
        if not self.inside and self._header[-5:-1] == " to=" and char.isalnum():
            self._enter()
        if self._ends_with("<|message|>"):
            self._header, self._body = None, _Body()
            if not self.inside:
                self._body.is_json = False  # prose: a quotation mark in it opens no string
        elif len(self._header) > _MAX_HEADER:
            self._header, self._body = None, None
            if self.inside:
                self._leave()


class LlamaDetector(Detector):
    """JSON calls as Llama 3 writes them: `{"name": ..., "parameters": ...}` as the answer, or behind `<|python_tag|>`.

    Several follow each other with semicolons, commas or line breaks. Objects further on in prose are prose.
    """

    _BEGINNINGS: Final = ('{"name":', '{"type":"function"', '{"function":')
    _TAG: Final = "<|python_tag|>"

    def __init__(self) -> None:
        super().__init__()
        self._may_begin = True
        self._begun = ""  # the beginning of an object that may be a call, without white space
        self._body = _Body()

    def _read(self, char: str) -> None:
        if self.inside:
            self._body.read(char)
            if self._body.depth == 0 and not self._body.in_string:
                self._leave()
                self._may_begin, self._begun = True, ""
        elif self._begun or (self._may_begin and char == "{"):
            self._begin(char)
        elif self._ends_with(self._TAG) and not self._quoted(self._TAG):
            self._may_begin = True
        elif not char.isspace() and char not in ";,[]":
            self._may_begin = False

    def _begin(self, char: str) -> None:
        if not self._begun:
            self._body = _Body()
        self._body.read(char)
        self._begun += "" if char.isspace() else char
        if self._begun in self._BEGINNINGS:
            self._enter()
        elif not any(known.startswith(self._begun) for known in self._BEGINNINGS):
            self._may_begin, self._begun = False, ""


class AnswerDetector(Detector):
    """The whole answer is the action: for agents whose model writes nothing but actions."""

    def _read(self, char: str) -> None:
        if not self.inside:
            self._enter()


def make_detector(template: str) -> Detector:
    """A detector for one answer.

    Args:
        template: a name of `call_templates.TEMPLATES` but `auto`, or a user's pattern `OPEN...CLOSE` of two literal markers, in which
            `\\n` stands for a line break.

    Raises:
        ValueError: neither.
    """
    known: dict[str, Callable[[], Detector]] = {
        "hermes": lambda: MarkerDetector("<tool_call>", "</tool_call>", begins=("{", "<function=")),
        "harmony": HarmonyDetector,
        "llama": LlamaDetector,
        "answer": AnswerDetector,
    }
    if template in known:
        return known[template]()
    opening, closing = markers_of(template)
    return MarkerDetector(opening, closing)


class ActionRegions:
    """The regions of one answer in tokens.

    Args:
        detector: a fresh one.
        decode: one token id -> its text, special tokens included. Markers are ASCII, so text that a token holds only a
            part of (half a character) does not matter.
    """

    def __init__(self, detector: Detector, decode: Callable[[int], str]) -> None:
        self._detector, self._decode = detector, decode
        self.tokens = 0  # read so far

    @property
    def inside(self) -> bool:
        """Whether the last token read is part of a region."""
        return self._detector.inside

    def advance(self, token: int) -> list[Edge]:
        """Read one token; returns the edges in its text, in order. Several calls may begin and end in one token."""
        self.tokens += 1
        return self._detector.feed(self._decode(token))

    def finish(self) -> list[Edge]:
        """The answer has ended."""
        return self._detector.finish()
