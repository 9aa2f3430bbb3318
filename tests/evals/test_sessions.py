"""Generated sessions: fixed by family and seed, every fact said once before it is asked, and judged strictly."""

import hashlib
import os
import random
import re
import statistics
import subprocess
import sys

import pytest

from intentkv.evals.draws import Fresh, digits
from intentkv.evals.families import FAMILIES, HELD_OUT, LONG_FACTS
from intentkv.evals.sessions import Session, Transcript, is_right, make_session

SEEDS = range(20)
FINGERPRINT = """
import hashlib
from intentkv.evals.families import FAMILIES
from intentkv.evals.sessions import make_session
text = "".join(repr(make_session(family, 7, forks=2, rewrites=2)) for family in FAMILIES.values())
print(hashlib.sha256(text.encode()).hexdigest())
"""


def session(family: str, seed: int) -> Session:
    return make_session(FAMILIES[family], seed, forks=1, rewrites=1)


def said_before(history: list[dict[str, str]]) -> str:
    return "\n".join(message["content"] for message in history if message["role"] == "tool")


@pytest.mark.parametrize("hash_seed", ["0", "1"])
def test_the_same_in_every_process(hash_seed: str) -> None:
    text = "".join(repr(make_session(family, 7, forks=2, rewrites=2)) for family in FAMILIES.values())
    environment = {**os.environ, "PYTHONHASHSEED": hash_seed}
    command = [sys.executable, "-c", FINGERPRINT]
    printed = subprocess.run(command, env=environment, capture_output=True, text=True, check=True).stdout
    assert printed.strip() == hashlib.sha256(text.encode()).hexdigest()


@pytest.mark.parametrize("family", FAMILIES)
def test_seeds_give_different_sessions(family: str) -> None:
    assert len({repr(session(family, seed).turns) for seed in SEEDS}) == len(SEEDS)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("seed", SEEDS)
def test_every_fact_asked_was_said_exactly_once_before(family: str, seed: int) -> None:
    """In the tool outputs of the asker's own history; and nowhere else in what it reads, whatever the model answered."""
    played = session(family, seed)
    transcript = Transcript(played)
    for turn in played.turns:
        prompt = transcript.ask(turn)
        value = rf"(?<![\w-]){re.escape(turn.expected)}(?![\w-])"
        assert len(re.findall(value, said_before(prompt), re.IGNORECASE)) == 1
        others = [message["content"] for message in prompt if message["role"] != "tool"]
        assert not any(re.search(value, text, re.IGNORECASE) for text in others)
        transcript.answered(turn, "I do not know.")


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("seed", SEEDS)
def test_age_and_repeats_are_what_they_say(family: str, seed: int) -> None:
    """Age counts the turns of the asker's path since the record with the answer; a repeat was asked by the main agent."""
    played = session(family, seed)
    transcript = Transcript(played)
    asked: list[str] = []
    for turn in played.turns:
        prompt = transcript.ask(turn)
        record = next(i for i, m in enumerate(prompt) if m["role"] == "tool" and is_right(m["content"], turn.expected))
        later = [i for i, m in enumerate(prompt) if m["role"] == "user" and i > record]
        # The user speaks twice in a turn that loads: once for the record, and to ask.
        loads = sum(1 for i in later if prompt[i]["content"].startswith("Please load"))
        assert turn.age == len(later) - loads - 1
        assert turn.asked_before == (turn.expected in asked)
        if turn.branch == 0:
            asked.append(turn.expected)
        transcript.answered(turn, "I do not know.")
    assert sum(turn.asked_before for turn in played.turns) == 2
    assert len(asked) - len(set(asked)) == 2


def test_a_sub_agent_goes_on_from_the_main_agents_history_and_stays_out_of_it() -> None:
    played = session("order-desk", 3)
    branch = [i for i, turn in enumerate(played.turns) if turn.branch == 1]
    assert len(branch) == 2 and branch[1] == branch[0] + 1
    transcript, prompts = Transcript(played), []
    for number, turn in enumerate(played.turns):
        prompts.append(transcript.ask(turn))
        transcript.answered(turn, f"Answer {number}.")
    before, first, second, after = (prompts[branch[0] + k] for k in (-1, 0, 1, 2))
    assert first[: len(before)] == before and second[: len(first)] == first
    assert after[: len(before)] == before
    sub_agents_own = [m["content"] for m in second[len(before) + 1 :]]
    assert not set(sub_agents_own) & {message["content"] for message in after}


def test_a_rewritten_answer_reaches_the_next_prompt_changed_and_with_its_words() -> None:
    played = session("travel", 1)
    transcript = Transcript(played)
    rewritten = 0
    for number, turn in enumerate(played.turns):
        transcript.ask(turn)
        transcript.answered(turn, f"The answer is {number}.")
        kept = transcript.ask(turn)[-len(turn.messages) - 1]["content"]
        assert f"The answer is {number}" in kept
        assert (kept != f"The answer is {number}.") == turn.rewritten
        rewritten += turn.rewritten
    assert rewritten == 1


@pytest.mark.parametrize("family", FAMILIES)
def test_some_questions_want_a_tool_call_and_some_facts_are_never_asked_for(family: str) -> None:
    turns = [turn for seed in SEEDS for turn in session(family, seed).turns]
    share = sum(turn.as_argument for turn in turns) / len(turns)
    assert 0.15 < share < 0.35
    assert all((FAMILIES[family].action in turn.messages[-1]["content"]) == turn.as_argument for turn in turns)
    distinct = [len({turn.expected for turn in session(family, seed).turns}) for seed in SEEDS]
    assert max(distinct) < 4 * 3


@pytest.mark.parametrize("family", ["code-review", "device-events"])
def test_some_families_are_dense_in_surprising_lines_that_nobody_asks_about(family: str) -> None:
    text = said_before(Transcript(session(family, 0)).ask(session(family, 0).turns[0]))
    noisy = re.findall(r"commit [0-9a-f]{40}|sha256-\S{44}|File \"/srv/|0x[0-9a-f]{12}", text)
    assert len(noisy) == FAMILIES[family].noise_lines


@pytest.mark.parametrize("family", FAMILIES)
def test_facts_are_shorter_than_the_filler_or_longer_or_as_long(family: str) -> None:
    """In characters of a sentence or line, so that a ranking by length alone does not do well on every kind."""
    played = session(family, 1)
    facts, filler = [], []
    for content in {m["content"] for turn in played.turns for m in turn.messages if m["role"] == "tool"}:
        for sentence in re.split(r"(?<=\.) |\n", content)[1:]:
            (facts if re.search(r"the .* of the .* is \d{4}\b", sentence, re.IGNORECASE) else filler).append(
                len(sentence)
            )
    assert len(facts) == 5 * 3
    if family in LONG_FACTS:
        assert min(facts) > 90 and statistics.median(filler) < 40
    elif family in HELD_OUT:
        assert min(filler) <= min(facts) and max(facts) <= max(filler)
    else:
        assert max(facts) < 70 and statistics.median(filler) > 90


def test_too_many_facts_are_refused() -> None:
    with pytest.raises(ValueError, match="36 objects, but 60 facts"):
        make_session(FAMILIES["travel"], 0, facts=15)
    fresh = Fresh(random.Random(0))
    with pytest.raises(ValueError, match="no fresh digits is left"):
        for _ in range(9001):
            fresh(digits)


@pytest.mark.parametrize(
    ("answer", "expected", "right"),
    [
        ("The door code is 4417.", "4417", True),
        ("The mileage is 4,417 miles", "4417", True),
        ("It is 44170.", "4417", False),
        ("It is 14417", "4417", False),
        ("Codes 4416 and 4418", "4417", False),
        ("the tag is WALNUT-93!", "walnut-93", True),
        ("walnut-931", "walnut-93", False),
        ("black-walnut-93", "walnut-93", False),
        ("print_label(\"walnut-93\")", "walnut-93", True),
        ("nina becker, I think", "Nina Becker", True),
        ("Nina Beckers", "Nina Becker", False),
        ("Nina", "Nina Becker", False),
        ("", "4417", False),
    ],
)  # fmt: skip
def test_the_judge(answer: str, expected: str, right: bool) -> None:
    assert is_right(answer, expected) is right
