"""How well SmolLM2-135M answers the generated sessions with nothing dropped, without a server.

    python scripts/calibrate_sessions.py                                # ten sessions of each family
    python scripts/calibrate_sessions.py --families travel --sessions 1 --show   # and every wrong answer

A scorer can only lose what the model can do at all: a family counts as calibrated at 80 % and more of its questions.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable

from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from intentkv.evals.local import LocalModel
from intentkv.evals.model import model_path
from intentkv.evals.plan import add_session_arguments, planned_sessions
from intentkv.evals.sessions import Session, Transcript, is_right

ENOUGH = 0.8
console = Console(stderr=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_session_arguments(parser, sessions=40, seed=200)
    parser.add_argument("--show", action="store_true", help="print every question that was answered wrongly")
    parser.add_argument("--json", action="store_true", help="print one JSON object as the last line")
    arguments = parser.parse_args()
    sessions = planned_sessions(arguments)
    model = LocalModel(model_path())
    results = {}
    table = Table(title="SmolLM2-135M-Instruct, float32, nothing dropped")
    for column in ("session", "right", "of", "share", "argument", "re-asked", "sub-agent", "tokens", "seconds"):
        table.add_column(column, justify="left" if column == "session" else "right")
    with Progress(console=console, transient=True) as progress:
        task = progress.add_task("turns", total=sum(len(session.turns) for session in sessions))
        for session in sessions:
            start = time.monotonic()
            right, tokens = play(session, model, arguments.show, lambda: progress.advance(task))
            results[session.name] = {"right": sum(right), "of": len(right), "tokens": tokens}
            parts = [
                [ok for ok, turn in zip(right, session.turns, strict=True) if chosen(turn)]
                for chosen in (lambda t: t.as_argument, lambda t: t.asked_before, lambda t: t.branch > 0)
            ]
            table.add_row(
                session.name,
                *(str(sum(right)), str(len(right)), f"{sum(right) / len(right):.0%}"),
                *(f"{sum(part)}/{len(part)}" for part in parts),
                *(f"{tokens:,}", f"{time.monotonic() - start:.0f}"),
            )
            console.print(f"{session.name}: {sum(right)} of {len(right)}", highlight=False)
    Console(width=max(console.width, 110)).print(table)
    for family in dict.fromkeys(name.rpartition("-")[0] for name in results):
        own = [result for name, result in results.items() if name.rpartition("-")[0] == family]
        right, of = sum(result["right"] for result in own), sum(result["of"] for result in own)
        verdict = "calibrated" if right >= ENOUGH * of else f"below {ENOUGH:.0%}"
        print(f"{family}: {right} of {of} right ({len(own)} sessions): {verdict}")
    if arguments.json:
        print(json.dumps(results))
    return 0


def play(session: Session, model: LocalModel, show: bool, finished: Callable[[], None]) -> tuple[list[bool], int]:
    """Whether each turn was answered right, and the tokens of the longest prompt."""
    transcript, right, longest = Transcript(session), [], 0
    for turn in session.turns:
        prompt = transcript.ask(turn)
        longest = max(longest, len(model.tokens(prompt)))
        answer = model.answer(prompt, session.answer_tokens, session.stop)
        transcript.answered(turn, answer)
        right.append(is_right(answer, turn.expected))
        if show and not right[-1]:
            question = turn.messages[-1]["content"]
            console.print(f"  {question} {turn.expected} (age {turn.age}): {answer!r}", markup=False, highlight=False)
        finished()
    return right, longest


if __name__ == "__main__":
    raise SystemExit(main())
