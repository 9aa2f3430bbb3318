"""What a user can set: for the server (flags, a TOML file, keyword arguments) and for one request.

Importable without torch and without SGLang, since the flags are added in processes that never use the rest.
"""

import argparse
import dataclasses
import tomllib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal, get_args

from intentkv import checks
from intentkv.errors import SettingsError
from intentkv.keep.budget import DEFAULT_BUDGET, Budget
from intentkv.observe.call_templates import TEMPLATES, markers_of
from intentkv.score.registry import HEAD_SCORER, SCORERS

__all__ = [
    "Budget",
    "RequestSettings",
    "Settings",
    "add_flags",
    "parse_request",
    "settings_from_flags",
    "settings_from_kwargs",
]


Layout = Literal["reclaim", "mask"]


def _action_template(raw: object) -> str:
    if isinstance(raw, str):
        if raw not in TEMPLATES:
            markers_of(raw)
        return raw
    raise ValueError(f"expected text, got {checks.shown(raw)}")


@dataclass(frozen=True)
class _Field:
    """One server setting: how it is checked, and what `--help` says about it."""

    check: Callable[[object], Any]
    metavar: str
    help: str


_FIELDS: dict[str, _Field] = {
    "scorer": _Field(checks.choice(SCORERS), "NAME", f"how history tokens are ranked: {', '.join(SCORERS)}"),
    "budget": _Field(
        Budget.parse,
        "N|N%|auto",
        "history tokens kept: a number, a share of the history, or auto: by the model's confidence",
    ),
    "trigger": _Field(checks.integer(1), "N", "an event needs at least this many droppable tokens"),
    "layout": _Field(
        checks.choice(get_args(Layout)), "NAME", "reclaim frees memory; mask only stops reading dropped tokens"
    ),
    "memory_decay": _Field(checks.number(0, 100), "X", "lambda of the session's query memory; 0 never forgets"),
    "max_sessions": _Field(checks.integer(1), "N", "sessions remembered; the least recently used one goes first"),
    "recent": _Field(checks.integer(0), "N", "tokens at the end of the context that are always kept"),
    "budget_init": _Field(checks.integer(1), "N", "history tokens that a budget of auto starts with"),
    "budget_max": _Field(checks.integer(1), "N", "history tokens that a budget of auto never exceeds"),
    "budget_growth": _Field(checks.number(1.01, 100), "X", "factor by which a budget of auto grows"),
    "lrfu_decay": _Field(checks.number(0, 1), "X", "actkv: how much of an entry's use counts at the next action"),
    "top_p": _Field(checks.number(0.01, 1), "X", "actkv: share of an action's attention that counts as use"),
    "action_template": _Field(
        _action_template, "NAME|OPEN...CLOSE", f"actkv: how calls are written: {', '.join(TEMPLATES)}, or two markers"
    ),
    "trace": _Field(
        checks.folder, "DIR", "write what was decided, with token ids, as JSON lines for `intentkv report`"
    ),
    "head": _Field(
        checks.file_path, "FILE", f"residual head, a .safetensors file; the scorer is then {HEAD_SCORER} unless named"
    ),
}


@dataclass(frozen=True)
class Settings:
    """Checked settings of a server. Build them with `settings_from_flags`, `settings_from_kwargs` or `from_dict`.

    Attributes:
        scorer: name in `intentkv.score.registry.SCORERS`.
        budget: history tokens kept by an event.
        trigger: an event needs at least this many droppable tokens.
        layout: `reclaim` or `mask`.
        memory_decay: lambda of `M_t = exp(-lambda) M_(t-1) + Enc(q_t)`.
        max_sessions: sessions the query memory holds.
        recent: tokens at the end that are always kept.
        budget_init, budget_max, budget_growth: tokens that a budget of `auto` starts with and never exceeds, and the
            factor it grows by.
        lrfu_decay, top_p: ActKV's lambda, and the share of an action's attention whose entries are hits.
        action_template: how the model writes calls, see `observe.call_templates`; `auto` asks its chat template.
        trace: folder for the trace, absolute; None writes none.
        head: the residual head's file, absolute, or None. Whether it fits the model is checked when the model is known.
    """

    scorer: str = "intent"
    budget: Budget = DEFAULT_BUDGET
    trigger: int = 512
    layout: Layout = "reclaim"
    memory_decay: float = 0.5
    max_sessions: int = 1024
    recent: int = 64
    budget_init: int = 512
    budget_max: int = 30000
    budget_growth: float = 1.75
    lrfu_decay: float = 0.5
    top_p: float = 0.9
    action_template: str = "auto"
    trace: str | None = None
    head: str | None = None

    def to_dict(self) -> dict[str, str | int | float]:
        """Plain values only, so that they survive JSON and unpickling in a process that lacks this package; what is
        None is left out."""
        values = {**dataclasses.asdict(self), "budget": str(self.budget)}
        return {name: value for name, value in values.items() if value is not None}

    @classmethod
    def from_dict(cls, values: object) -> "Settings":
        """The reverse of `to_dict`; what is missing keeps its default. Raises SettingsError with every reason."""
        if not isinstance(values, Mapping):
            raise SettingsError([f"expected an object with settings, got {checks.shown(values)}"])
        return _checked([(checks.named(name), name, raw) for name, raw in values.items()], [])


def settings_from_kwargs(**values: object) -> Settings:
    """Settings for `sglang.Engine` users, e.g. `settings_from_kwargs(scorer="streaming", budget="25%")`.

    Takes every field of `Settings`, and `config` (a TOML file that the other arguments beat).
    Raises SettingsError with every reason.
    """
    path = values.pop("config", None)
    reasons: list[str] = []
    entries = [] if path is None else _read_file(str(path), reasons)
    return _checked(entries + [(checks.named(name), name, raw) for name, raw in values.items()], reasons)


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Add `--enable-intentkv` and the `--intentkv-*` flags to `parser`.

    Values stay text and default to None: a bad one is reported together with all others, and an absent one lets the
    file speak.
    """
    group = parser.add_argument_group("intentkv")
    group.add_argument(
        "--enable-intentkv", action="store_true", help="drop the KV cache entries a session no longer needs"
    )
    defaults = Settings().to_dict()
    for name, field in _FIELDS.items():
        text = f"{field.help} (default: {defaults.get(name, 'none')})".replace("%", "%%")
        group.add_argument(_flag(name), default=None, metavar=field.metavar, help=text)
    group.add_argument(
        _flag("config"), default=None, metavar="FILE", help="TOML file with the same keys; flags beat it"
    )


def settings_from_flags(ns: argparse.Namespace) -> Settings | None:
    """Settings from parsed flags and the file they name; None where `--enable-intentkv` is off.

    Raises SettingsError with every reason, also where a flag is given but `--enable-intentkv` is not.
    """
    given = {name: raw for name in (*_FIELDS, "config") if (raw := getattr(ns, f"intentkv_{name}", None)) is not None}
    if not getattr(ns, "enable_intentkv", False):
        if given:
            raise SettingsError([f"{_flag(name)} has no effect without --enable-intentkv: add it" for name in given])
        return None
    path = given.pop("config", None)
    reasons: list[str] = []
    entries = [] if path is None else _read_file(path, reasons)
    return _checked(entries + [(_flag(name), name, raw) for name, raw in given.items()], reasons)


@dataclass(frozen=True)
class RequestSettings:
    """Checked settings of one request.

    Attributes:
        session: the client's session id, or None.
        budget, scorer: the request's own, or the server's.
        enabled: False leaves this request to stock SGLang.
        span: `[start, end)` in the prompt, whose tokens tell the session, or None.
    """

    session: str | None
    budget: Budget
    scorer: str
    enabled: bool
    span: tuple[int, int] | None


_REQUEST_CHECKS: dict[str, Callable[[object], Any]] = {
    "session": checks.session_id,
    "budget": Budget.parse,
    "scorer": _FIELDS["scorer"].check,
    "enabled": checks.switch,
    "span": checks.token_span,
}


def parse_request(custom_params: object, session_id: object, defaults: Settings) -> RequestSettings:
    """Settings of a request from its `custom_params` (keys `intentkv_*`) and its top-level `session_id`.

    Other keys, and `custom_params` that are no mapping, are somebody else's and are left alone. A value of None counts
    as not given. Raises SettingsError with every reason.
    """
    params = custom_params if isinstance(custom_params, Mapping) else {}
    entries = [
        (checks.named(key), key.removeprefix("intentkv_"), raw)
        for key, raw in params.items()
        if isinstance(key, str) and key.startswith("intentkv_") and raw is not None
    ]
    reasons: list[str] = []
    values = _check_all(entries, _REQUEST_CHECKS, "intentkv_", reasons)
    if values.get("scorer") == HEAD_SCORER and defaults.head is None:
        reasons.append(f"intentkv_scorer: {HEAD_SCORER} needs a server that was started with --intentkv-head")
    if session_id is not None:
        values |= _check_all([("session_id", "session", session_id)], _REQUEST_CHECKS, "", reasons)
        own = params.get("intentkv_session")
        if isinstance(own, str) and isinstance(session_id, str) and own != session_id:  # other types are refused above
            reasons.append(
                f"session_id and intentkv_session: expected one of them, or both equal, "
                f"got {checks.shown(session_id)} and {checks.shown(own)}"
            )
    if reasons:
        raise SettingsError(reasons)
    fallback = {"session": None, "budget": defaults.budget, "scorer": defaults.scorer, "enabled": True, "span": None}
    return RequestSettings(**{**fallback, **values})


def _flag(name: str) -> str:
    return f"--intentkv-{name.replace('_', '-')}"


def _read_file(path: str, reasons: list[str]) -> list[tuple[str, str, object]]:
    try:
        with open(path, "rb") as file:
            values = tomllib.load(file)
    except (OSError, ValueError, RecursionError) as error:  # ValueError: bad TOML and bad UTF-8
        why = error.strerror if isinstance(error, OSError) else error
        reasons.append(f"--intentkv-config: cannot read {checks.shown(path)}: {why}")
        return []
    names = [key.replace("-", "_") for key in values]  # keys may be spelled as the flags are, with dashes
    reasons.extend(
        f"{path}: {checks.named(name)} is given twice" for name in sorted({n for n in names if names.count(n) > 1})
    )
    return [(f"{path}: {checks.named(key)}", name, raw) for (key, raw), name in zip(values.items(), names, strict=True)]


def _checked(entries: list[tuple[str, str, object]], reasons: list[str]) -> Settings:
    values = _check_all(entries, {name: field.check for name, field in _FIELDS.items()}, "", reasons)
    first, most = values.get("budget_init", Settings.budget_init), values.get("budget_max", Settings.budget_max)
    if first > most:
        reasons.append(
            f"budget_init: expected at most budget_max, got {first} and {most}: lower it, or raise budget_max"
        )
    if "head" in values:
        values = {"scorer": HEAD_SCORER, **values}
    elif values.get("scorer") == HEAD_SCORER and not any(name == "head" for _, name, _ in entries):
        reasons.append(f"scorer {HEAD_SCORER} reads a residual head: set --intentkv-head to its file")
    if reasons:
        raise SettingsError(reasons)
    return Settings(**values)


def _check_all(
    entries: list[tuple[str, str, object]],
    known: Mapping[str, Callable[[object], Any]],
    prefix: str,
    reasons: list[str],
) -> dict[str, Any]:
    """Check `(where it was given, name, value)` entries, later ones first in rank; add to `reasons` what is wrong."""
    values: dict[str, Any] = {}
    for where, name, raw in entries:
        if name not in known:
            reasons.append(f"{where}: unknown key; the nearest is {prefix}{checks.nearest(name, known)}")
            continue
        try:
            values[name] = known[name](raw)
        except ValueError as error:
            reasons.append(f"{where}: {error}")
    return values
