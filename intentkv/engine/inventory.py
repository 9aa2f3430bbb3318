"""The inventory of hooks: what is patched, what it must look like, and proof that it is in place.

The rows live in `patches/hooks.toml`, their pins per SGLang version in `patches/sglang-<version>.toml`; both are shipped
in the wheel as `intentkv.patches`.
"""

from __future__ import annotations

import ast
import functools
import hashlib
import importlib.metadata
import importlib.util
import inspect
import pkgutil
import sys
import tomllib
import types
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class HookRow:
    """One row of the inventory; the fields are explained at the head of `patches/hooks.toml`."""

    target: str
    kind: str
    handler: str
    when: str
    why: str
    assumes: str
    removed_by: str

    @property
    def is_patch(self) -> bool:
        """Whether the target itself is hooked; methods that we override in a subclass or rely on are only pinned."""
        return self.kind not in ("override", "relied")

    def load_handler(self) -> Callable[..., Any]:
        return pkgutil.resolve_name(self.handler)


@dataclass(frozen=True)
class Pin:
    """What a target looks like in one SGLang version: signature as text, sha256 of its source."""

    signature: str
    source: str


def load_rows(when: str | None = None) -> list[HookRow]:
    """Rows of the inventory, all or only those with the given `when` ("flags" or "on")."""
    table = tomllib.loads((files("intentkv.patches") / "hooks.toml").read_text(encoding="utf-8"))
    rows = [HookRow(**row) for row in table["hook"]]
    return [row for row in rows if when is None or row.when == when]


def sglang_version() -> str:
    return importlib.metadata.version("sglang")


def pinned_versions() -> list[str]:
    names = (entry.name for entry in files("intentkv.patches").iterdir())
    return sorted(
        name.removeprefix("sglang-").removesuffix(".toml")
        for name in names
        if name.startswith("sglang-") and name.endswith(".toml")
    )


def load_pins(version: str) -> dict[str, Pin] | None:
    """Pins of one SGLang version, or None where that version was never checked."""
    path = files("intentkv.patches") / f"sglang-{version}.toml"
    if not path.is_file():
        return None
    return {target: Pin(**pin) for target, pin in tomllib.loads(path.read_text(encoding="utf-8")).items()}


def take_pin(row: HookRow) -> Pin:
    """The pin of a row's target: what is patched as it is in this process, hooks looked through; the rest from its file.

    Raises:
        ImportError, AttributeError: the target does not exist.
    """
    if not row.is_patch:
        return _pin_from_file(row.target)
    function = list(_chain(pkgutil.resolve_name(row.target)))[-1]
    return _pin(str(inspect.signature(function)), inspect.getsource(function).splitlines())


def _pin_from_file(target: str) -> Pin:
    """The pin of a method, read without importing its module: FA3's cannot be imported where there is no GPU."""
    module, class_name, name = target.rsplit(".", 2)
    lines, classes = _classes(module)
    for node in classes.get(class_name, ()):
        if isinstance(node, ast.FunctionDef) and node.name == name:
            result = f" -> {ast.unparse(node.returns)}" if node.returns else ""
            start = min([node.lineno, *(decorator.lineno for decorator in node.decorator_list)])
            return _pin(f"({ast.unparse(node.args)}){result}", lines[start - 1 : node.end_lineno])
    raise AttributeError(f"{module} has no {class_name}.{name}")


@functools.cache
def _classes(module: str) -> tuple[list[str], dict[str, list[ast.stmt]]]:
    spec = importlib.util.find_spec(module)
    if spec is None or spec.origin is None:
        raise ModuleNotFoundError(f"No module named {module!r}")
    text = Path(spec.origin).read_text(encoding="utf-8")
    return text.splitlines(), {node.name: node.body for node in ast.parse(text).body if isinstance(node, ast.ClassDef)}


def _pin(signature: str, lines: list[str]) -> Pin:
    source = "\n".join(line.rstrip() for line in lines)
    return Pin(signature, hashlib.sha256(source.encode()).hexdigest())


def problems_before(rows: list[HookRow], pins: dict[str, Pin] | None) -> list[str]:
    """Why these rows cannot be applied; one line each, empty when they can."""
    from sglang.srt.plugins.hook_registry import HookRegistry

    if pins is None:
        known = ", ".join(pinned_versions())
        return [f"SGLang {sglang_version()} was never checked with this intentkv: install one of {known}"]
    problems = []
    for row in rows:
        try:
            pin = take_pin(row)
        except (ImportError, AttributeError) as error:
            problems.append(f"hook target {row.target} is missing ({error}): this SGLang does not match its pins")
            continue
        expected = pins.get(row.target)
        if expected is None:
            problems.append(f"hook target {row.target} has no pin for SGLang {sglang_version()}: reinstall intentkv")
        elif pin.signature != expected.signature:
            problems.append(
                f"hook target {row.target} changed its signature: expected {expected.signature}, got {pin.signature}; "
                "install the SGLang version that intentkv pins"
            )
        if not row.is_patch:
            continue
        strangers = sorted(
            str(source.plugin_name if source else hook.__module__)
            for _, hook, source in HookRegistry._hooks.get(row.target, ())
            # Adding and reading flags side by side is what these two functions are for; SGLang's own dependencies do.
            if row.when != "flags" and hook is not row.load_handler()
        )
        if strangers:
            problems.append(
                f"hook target {row.target} is hooked by {', '.join(strangers)} too: "
                "remove that plug-in, or leave it out with SGLANG_PLUGINS"
            )
        elif _wrapped_by_others(row):
            problems.append(
                f"hook target {row.target} was wrapped by other code than SGLang's hook registry: remove it"
            )
    return problems


def problems_after(rows: list[HookRow]) -> list[str]:
    """Rows that are not in force in this process: the hook is not in the chain, or a stale reference goes round it."""
    problems = []
    for row in (row for row in rows if row.is_patch):
        current = pkgutil.resolve_name(row.target)
        if not _calls(current, row.load_handler()):
            problems.append(f"hook on {row.target} is not in place although it was registered: report this as a bug")
            continue
        original = _first_unhooked(current)
        for place in _references(original):
            problems.append(f"hook on {row.target} is bypassed by the stale reference {place}: report this as a bug")
    return problems


def source_drift(rows: list[HookRow], pins: dict[str, Pin]) -> list[str]:
    """Targets whose source differs from the pinned one though the signature fits; worth a look, not a reason to refuse."""
    return [row.target for row in rows if row.target in pins and take_pin(row).source != pins[row.target].source]


def _chain(function: Any) -> Iterator[Any]:
    function = getattr(function, "__func__", function)
    while function is not None:
        yield function
        function = getattr(function, "__wrapped__", None)


def _calls(function: Any, handler: Callable[..., Any]) -> bool:
    """Whether a wrapper of SGLang's hook registry in the chain closes over the handler."""
    return any(cell.cell_contents is handler for link in _chain(function) for cell in link.__closure__ or ())


def _is_registry_wrapper(function: Any) -> bool:
    return function.__code__.co_filename.endswith("hook_registry.py")


def _first_unhooked(function: Any) -> Any:
    return next(link for link in _chain(function) if not _is_registry_wrapper(link))


def _wrapped_by_others(row: HookRow) -> bool:
    root = sys.modules["sglang"].__path__[0]
    return any(not link.__code__.co_filename.startswith(root) for link in _chain(pkgutil.resolve_name(row.target)))


def _references(original: Any) -> Iterator[str]:
    """Names in SGLang's modules, classes and module-level tables that still lead to the unhooked function."""
    for name, module in list(sys.modules.items()):
        if not name.startswith("sglang.") or not isinstance(module, types.ModuleType):
            continue
        for attribute, value in list(vars(module).items()):
            if value is original:
                yield f"{name}.{attribute}"
            elif isinstance(value, dict) and any(entry is original for entry in value.values()):
                yield f"{name}.{attribute}[...]"
            elif isinstance(value, type) and value.__module__ == name:
                for member, held in list(vars(value).items()):
                    if getattr(held, "__func__", held) is original:
                        yield f"{name}.{attribute}.{member}"
