"""The multi-turn cases of BFCL v4 out of the package `bfcl-eval`: what is said in each turn, and the tools there are in it."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

from intentkv.evals.cache_folder import cache_folder

CATEGORIES: Final = ("multi_turn_base", "multi_turn_miss_func", "multi_turn_miss_param", "multi_turn_long_context")
MISSING: Final = (
    "BFCL is in the package bfcl-eval: pip install 'intentkv[bfcl]' in an environment of its own (it pins packages that "
    "SGLang wants newer), or pip install --no-deps bfcl-eval in that of SGLang"
)


@dataclass(frozen=True)
class CaseTurn:
    """What the user says, and every tool that the model may call in this turn, as OpenAI's API takes them."""

    messages: tuple[dict[str, Any], ...]
    tools: tuple[dict[str, Any], ...]


@dataclass(frozen=True)
class Case:
    """One case.

    Attributes:
        name: bfcl's id, such as `multi_turn_base_0`.
        truth: the calls that solve each turn, as Python expressions; none where the turn cannot be solved.
        entry: the case as bfcl has it: the classes of its simulators and their first state.
    """

    name: str
    turns: tuple[CaseTurn, ...]
    truth: tuple[tuple[str, ...], ...]
    entry: dict[str, Any]

    @property
    def category(self) -> str:
        return self.name.rpartition("_")[0]

    @property
    def long_context(self) -> bool:
        """Whether the simulators are filled with far more than the case needs."""
        return "long_context" in self.category


def load_cases(categories: Sequence[str], most: int | None = None) -> list[Case]:
    """The first `most` cases (all by default) of each category.

    Raises:
        ImportError: there is no bfcl-eval; says how to get it.
    """
    # bfcl makes folders for its own results where this points to; by default beside the installed package.
    os.environ.setdefault("BFCL_PROJECT_ROOT", str(cache_folder("bfcl")))
    try:
        from bfcl_eval.utils import load_dataset_entry, load_ground_truth_entry
    except ModuleNotFoundError as error:
        raise ImportError(f"{MISSING} ({error})") from error
    cases = []
    for category in categories:
        truths = {truth["id"]: truth["ground_truth"] for truth in load_ground_truth_entry(category)}
        cases += [_case(entry, truths[entry["id"]]) for entry in load_dataset_entry(category)[:most]]
    return cases


def _case(entry: dict[str, Any], truth: list[list[str]]) -> Case:
    """A function that is held back gets into the tools in the turn that bfcl names; there the user only says so."""
    from bfcl_eval.constants.default_prompts import DEFAULT_USER_PROMPT_FOR_ADDITIONAL_FUNCTION_FC as MORE_TOOLS

    tools = [openai_tool(function) for function in entry["function"]]
    turns = []
    for number, messages in enumerate(entry["question"]):
        held_back = entry.get("missed_function", {}).get(str(number), [])
        if held_back:
            tools = [*tools, *(openai_tool(function) for function in held_back)]
            messages = [{"role": "user", "content": MORE_TOOLS}]
        turns.append(CaseTurn(tuple(messages), tuple(tools)))
    return Case(entry["id"], tuple(turns), tuple(tuple(calls) for calls in truth), entry)


def openai_tool(function: dict[str, Any]) -> dict[str, Any]:
    """A function's description as a tool of OpenAI's API: JSON schema has no `dict` and no `float`. Says nothing of what it returns."""
    schema = _schema({**function["parameters"], "type": "dict"})
    about = {"name": function["name"], "description": function["description"], "parameters": schema}
    return {"type": "function", "function": about}


def _schema(about: dict[str, Any]) -> dict[str, Any]:
    from bfcl_eval.constants.type_mappings import GORILLA_TO_OPENAPI

    kind = about.get("type", "string")
    made = {**about, "type": GORILLA_TO_OPENAPI.get(kind, "string")}
    if kind == "float":
        made |= {"format": "float", "description": f"{about.get('description', '')} This is a float type value."}
    if "properties" in about:
        made["properties"] = {name: _schema(inner) for name, inner in about["properties"].items()}
    if "items" in about:
        made["items"] = _schema(about["items"])
    return made
