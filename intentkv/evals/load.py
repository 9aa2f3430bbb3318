"""Many agents at once against one server: each plays its session turn by turn, as fast as the answers come."""

from __future__ import annotations

import asyncio
import threading
import time
import urllib.request
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import openai

from intentkv.evals.client import branch_id
from intentkv.evals.sessions import Session, Transcript, is_right

TURN_SECONDS = 900.0


@dataclass(frozen=True)
class LoadTurn:
    """One finished turn. Times in seconds since the start of the run; `cached` and `prompt` in tokens."""

    session: str
    number: int
    begin: float
    first_token: float
    tokens: tuple[float, ...]
    prompt: int
    cached: int
    right: bool


@dataclass
class LoadResult:
    """What a run brought; `peak_used` is the largest share of the pool in use by running requests."""

    turns: list[LoadTurn] = field(default_factory=list)
    errors: list[str] = field(default_factory=list)
    seconds: float = 0.0
    peak_used: float = 0.0
    counters: dict[str, float] = field(default_factory=dict)

    def turns_per_second(self) -> float:
        return len(self.turns) / self.seconds if self.seconds else 0.0

    def prefix_hit(self) -> float:
        """Share of prompt tokens that were not computed again, over all turns but each session's first."""
        later = [turn for turn in self.turns if turn.number > 1]
        return sum(turn.cached for turn in later) / max(1, sum(turn.prompt for turn in later))

    def to_first_token(self) -> list[float]:
        return [turn.first_token - turn.begin for turn in self.turns]

    def between_tokens(self) -> list[float]:
        return [
            later - sooner for turn in self.turns for sooner, later in zip(turn.tokens, turn.tokens[1:], strict=False)
        ]


def play_together(
    sessions: Sequence[Session], url: str, finished: Callable[[], None] = lambda: None, **extra: Any
) -> LoadResult:
    """Play all sessions at once, each in its own order, at temperature 0.

    Args:
        url: "http://host:port" of a server started with `--enable-cache-report` and `--enable-metrics`.
        finished: called after every turn. extra: fields added to every request's body.
    """
    result = LoadResult()
    stop = threading.Event()
    watcher = threading.Thread(target=_watch_pool, args=(url, result, stop))
    watcher.start()
    begin = time.monotonic()
    try:
        asyncio.run(_play_all(sessions, url, result, begin, finished, extra))
    finally:
        result.seconds = time.monotonic() - begin
        stop.set()
        watcher.join()
        result.counters = read_metrics(url)
    return result


async def _play_all(
    sessions: Sequence[Session],
    url: str,
    result: LoadResult,
    begin: float,
    finished: Callable[[], None],
    extra: dict[str, Any],
) -> None:
    async with openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none", timeout=TURN_SECONDS, max_retries=0) as client:
        await asyncio.gather(*(_play_one(s, client, result, begin, finished, extra) for s in sessions))


async def _play_one(
    session: Session,
    client: openai.AsyncOpenAI,
    result: LoadResult,
    begin: float,
    finished: Callable[[], None],
    extra: dict[str, Any],
) -> None:
    transcript = Transcript(session)
    for number, turn in enumerate(session.turns, start=1):
        messages: Any = transcript.ask(turn)
        asked = time.monotonic() - begin
        times: list[float] = []
        pieces: list[str] = []
        usage: Any = None
        try:
            stream: Any = await client.chat.completions.create(
                model="default",
                messages=messages,
                temperature=0,
                max_tokens=session.answer_tokens,
                stop=session.stop,
                stream=True,
                stream_options={"include_usage": True},
                extra_body={"session_id": branch_id(session.name, turn), "no_stop_trim": True, **extra},
            )
            async for chunk in stream:
                usage = chunk.usage or usage
                if chunk.choices and chunk.choices[0].delta.content:
                    times.append(time.monotonic() - begin)
                    pieces.append(chunk.choices[0].delta.content)
        except openai.OpenAIError as error:
            result.errors.append(f"{session.name}, turn {number}: {error}")
            return
        answer = "".join(pieces)
        details = usage.prompt_tokens_details
        result.turns.append(
            LoadTurn(
                session=session.name,
                number=number,
                begin=asked,
                first_token=times[0] if times else time.monotonic() - begin,
                tokens=tuple(times),
                prompt=usage.prompt_tokens,
                cached=(details.cached_tokens or 0) if details else 0,
                right=is_right(answer, turn.expected),
            )
        )
        finished()
        transcript.answered(turn, answer)


def _watch_pool(url: str, result: LoadResult, stop: threading.Event) -> None:
    while not stop.wait(0.5):
        result.peak_used = max(result.peak_used, read_metrics(url).get("sglang:token_usage", 0.0))


def read_metrics(url: str) -> dict[str, float]:
    """The server's Prometheus values by name; of a name with several label sets, the sum."""
    with urllib.request.urlopen(f"{url}/metrics", timeout=60) as answer:
        lines = answer.read().decode().splitlines()
    values: dict[str, float] = {}
    for line in lines:
        if line and not line.startswith("#"):
            name, value = line.split("{")[0].split(" ")[0], float(line.rsplit(" ", 1)[1])
            values[name] = values.get(name, 0.0) + value
    return values
