"""The simulators and the checker of BFCL: what a model's calls do, and whether they did what a case asks for.

bfcl evaluates calls as Python, in a module of its own. So a call is written here, out of a name that a simulator has and
arguments that came as JSON; whatever else a model says is not evaluated.
"""

from __future__ import annotations

import itertools
import keyword
from collections.abc import Sequence
from types import ModuleType, TracebackType
from typing import Any, Self

from intentkv.evals.bfcl_cases import Case

Call = tuple[str, dict[str, Any]]  # a function's name and its arguments
NO_SUCH_CALL = "no_such_function()"  # for the checker: fails there as the call would

_numbers = itertools.count()


class World:
    """The simulators of one case for one play; a context manager, because bfcl keeps their state until it is taken away."""

    def __init__(self, case: Case) -> None:
        self._case = case
        self._owner = f"intentkv_play_{next(_numbers)}_"  # bfcl makes a variable's name of it
        _, simulators = self._evaluated([])
        self._functions = {
            name
            for simulator in simulators.values()
            for name in dir(simulator)
            if not name.startswith("_") and callable(getattr(simulator, name))
        }

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        module = _simulators()
        for name in [name for name in vars(module) if name.startswith(self._owner)]:
            delattr(module, name)

    def run(self, calls: Sequence[Call]) -> tuple[list[str], list[str]]:
        """Executes `calls` in order. Returns them as the checker wants them, and what each brought, errors in words."""
        written, results = [], []
        for name, arguments in calls:
            call = self._written(name, arguments)
            written.append(call)
            if call == NO_SUCH_CALL:
                results.append(f"Error during execution: name {name!r} is not defined")
            else:
                (result,), _ = self._evaluated([call])
                results.append(result)
        return written, results

    def verdict(self, said: Sequence[Sequence[Sequence[str]]]) -> str:
        """What is wrong with the calls of a play (turns, their steps, a step's calls), in bfcl's words; "" for nothing.

        The checker executes them once more, beside the true ones, in simulators of its own.
        """
        from bfcl_eval.eval_checker.multi_turn_eval.multi_turn_checker import multi_turn_checker

        case = self._case
        if len(said) != len(case.truth):
            return "multi_turn:force_terminated"
        plain = [[list(step) for step in turn] for turn in said]
        truth = [list(calls) for calls in case.truth]
        found = multi_turn_checker(plain, truth, case.entry, case.category, self._owner)
        return "" if found["valid"] else str(found["error_type"])

    def _written(self, name: str, arguments: dict[str, Any]) -> str:
        plain = all(key.isidentifier() and not keyword.iskeyword(key) for key in arguments)
        if name not in self._functions or not plain:
            return NO_SUCH_CALL
        return f"{name}({', '.join(f'{key}={value!r}' for key, value in arguments.items())})"

    def _evaluated(self, calls: list[str]) -> tuple[list[str], dict[str, Any]]:
        case = self._case
        results, simulators = _simulators().execute_multi_turn_func_call(
            func_call_list=calls,
            initial_config=case.entry["initial_config"],
            involved_classes=case.entry["involved_classes"],
            model_name=self._owner,
            test_entry_id=case.name,
            long_context=case.long_context,
        )
        return list(results), dict(simulators)


def _simulators() -> ModuleType:
    from bfcl_eval.eval_checker.multi_turn_eval import multi_turn_utils

    return multi_turn_utils  # type: ignore[no-any-return]
