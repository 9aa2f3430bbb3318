"""What a scorer keeps of a session, without a server: one forward, then all turns' events on its keys, queries and surprise.

An approximation, and cheap: keys are those of the whole text, computed with nothing dropped, where a server computes behind
holes; and a fact counts as kept if a sentence that states it is live in full, whether or not the model would then say it. It
tells rankings apart on hundreds of sessions; what an answer is worth is measured on a server (`scripts/eval_agents.py`).
"""

from __future__ import annotations

import re
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from transformers import AutoTokenizer

from intentkv.evals.sessions import Session, Transcript
from intentkv.keep.budget import Budget
from intentkv.keep.dialogue import newest_that_fit, room
from intentkv.keep.forced import forced_mask
from intentkv.keep.select import candidates, choose_drop
from intentkv.kernels.surprise import token_surprise
from intentkv.observe.messages import MessageFormat
from intentkv.observe.query_window import WINDOW_ROWS
from intentkv.observe.segments import TokenMarks, segment_numbers, word_numbers
from intentkv.observe.spans import Spans, find_spans, query_positions
from intentkv.score.base import ScoreInput, Scorer, Window
from intentkv.score.memory import QueryMemory
from intentkv.train.capture import Captured, CaptureModel

TRIGGER, RECENT = 64, 64  # tokens


class _Windows(Captured):
    """Takes the last query rows of every prompt too."""

    def __init__(self, spans: list[tuple[int, int]], dtype: torch.dtype, ends: list[int]) -> None:
        super().__init__(spans, dtype)
        self.rows: list[list[Tensor]] = [[] for _ in ends]
        self._ends = ends

    def take(self, layer: int, query: Tensor, key: Tensor) -> None:
        super().take(layer, query, key)
        for end, rows in zip(self._ends, self.rows, strict=True):
            rows.append(query[:, max(0, end - WINDOW_ROWS) : end].transpose(0, 1).clone())


@dataclass(frozen=True)
class Prompt:
    """One turn: its prompt's length, its spans, and the segments of the history that state what it asks for."""

    length: int
    spans: Spans
    stated_in: NDArray[np.int64]


@dataclass(frozen=True)
class Replay:
    """A session after its one forward. `segments`, `words` `[N]` int64, `surprise` `[N]` float32."""

    name: str
    prompts: list[Prompt]
    captured: _Windows
    segments: NDArray[np.int64]
    words: NDArray[np.int64]
    surprise: Tensor

    @property
    def length(self) -> int:
        return len(self.segments)


class Replayer:
    """Reads sessions with one model, right answers put into its mouth."""

    def __init__(
        self,
        model: str,
        message_format: Callable[[Any], MessageFormat | None],
        token_marks: Callable[[Any], TokenMarks],
    ) -> None:
        self._tokenizer: Any = AutoTokenizer.from_pretrained(model)
        self._format = message_format(self._tokenizer)
        self._marks = token_marks(self._tokenizer)
        self._model = CaptureModel(model)
        if not self._model.model.config.tie_word_embeddings:
            raise ValueError(f"{model}: expected a model whose LM head is its embedding, which is the head read here")
        self._head: Tensor = self._model.model.get_input_embeddings().weight.detach()

    @torch.inference_mode()
    def read(self, session: Session) -> Replay:
        """One forward over the whole main branch of `session`."""
        transcript, prompts, ids = Transcript(session), [], np.empty(0, np.int64)
        for turn in session.turns:
            if turn.branch:
                continue
            ids = self._tokens(transcript.ask(turn))
            prompts.append((len(ids), find_spans(ids, self._format), turn.expected))
            transcript.answered(turn, f"It is {turn.expected}.")
        segments = segment_numbers(ids, self._marks)
        captured = _Windows(
            [spans.query for _, spans, _ in prompts], self._model.dtype, [length for length, _, _ in prompts]
        )
        hidden: Tensor = self._model.run(torch.from_numpy(ids), captured)
        surprise = torch.zeros(len(ids))
        surprise[1:] = token_surprise(hidden[:-1], torch.from_numpy(ids[1:]), self._head)
        texts = [self._tokenizer.decode([token]) for token in ids.tolist()]
        stated = [
            Prompt(length, spans, _stated_in(texts[: spans.query[0]], expected, segments))
            for length, spans, expected in prompts
        ]
        return Replay(session.name, stated, captured, segments, word_numbers(ids, segments, self._marks), surprise)

    def _tokens(self, messages: list[dict[str, str]]) -> NDArray[np.int64]:
        ids = self._tokenizer.apply_chat_template(
            messages, tokenize=True, return_dict=False, add_generation_prompt=True
        )
        return np.array(ids, dtype=np.int64)


def _stated_in(texts: list[str], value: str, segments: NDArray[np.int64]) -> NDArray[np.int64]:
    """Segments of the tokens `texts` in which `value` occurs as a whole."""
    starts = np.cumsum([0, *map(len, texts)])
    found = re.finditer(rf"(?<![\w-]){re.escape(value)}(?![\w-])", "".join(texts))
    tokens = np.searchsorted(starts, [match.start() for match in found], side="right") - 1
    return np.unique(segments[tokens]) if len(tokens) else np.empty(0, np.int64)


def facts_kept(replay: Replay, scorer: Scorer, budget: int, decay: float) -> list[bool]:
    """For each turn that asks for something of the history: whether a sentence with it is live in full when it is answered.

    Args:
        budget: tokens of history. decay: the query memory's lambda.
    """
    holes = np.empty(0, np.int64)
    memory = QueryMemory(decay, max_sessions=1)
    kept = []
    for turn, prompt in enumerate(replay.prompts):
        forced = forced_mask(prompt.length, prompt.spans, RECENT)
        query = replay.captured.queries[turn].mean()
        asked = memory.update("session", query)
        positions = candidates(forced, holes)
        x = score_input(replay, turn, positions, holes, query, asked, budget, int(np.count_nonzero(~forced)))
        scores = scorer.score(x).numpy()
        drop = choose_drop(scores, forced, holes, Budget("fixed", budget), TRIGGER)
        holes = np.union1d(holes, drop)
        if len(prompt.stated_in):
            missing = set(np.unique(replay.segments[holes]).tolist()) if len(holes) else set()
            kept.append(any(segment not in missing for segment in prompt.stated_in.tolist()))
    return kept


def score_input(
    replay: Replay,
    turn: int,
    positions: NDArray[np.int64],
    holes: NDArray[np.int64],
    query: Tensor,
    memory: Tensor,
    budget: int,
    history: int,
) -> ScoreInput:
    """What a server would give a scorer at the end of a turn's prompt; slots are positions. Budget and history in tokens."""
    prompt, keys = replay.prompts[turn], replay.captured.keys
    slots = torch.from_numpy(positions)
    live = torch.from_numpy(np.setdiff1d(np.arange(prompt.length), holes))
    rows = torch.stack(replay.captured.rows[turn])
    asked = query_positions(prompt.spans, prompt.length, holes)
    return ScoreInput(
        layer_keys=keys.__getitem__,
        slots=slots,
        positions=slots,
        seed=zlib.crc32(replay.name.encode()),
        num_layers=len(keys),
        share=Budget("fixed", budget).share(history),
        segments=torch.from_numpy(replay.segments[positions]),
        memory=memory,
        query=query,
        surprise=replay.surprise[slots],
        window=Window(rows, prompt.length - rows.shape[1], live, live, keys[0].shape[-1] ** -0.5),
        query_slots=torch.from_numpy(asked),
        dialogue=torch.from_numpy(newest_that_fit(prompt.spans.said, positions, room(budget, history))),
        words=torch.from_numpy(replay.words[positions]),
    )
