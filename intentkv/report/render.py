"""The page as one HTML file: our template, style and script, and nothing from anywhere else."""

from __future__ import annotations

import base64
import hashlib
from importlib.resources import files

from jinja2 import DictLoader, Environment, StrictUndefined
from markupsafe import Markup

from intentkv.report import charts
from intentkv.report.text import visible
from intentkv.report.view import TEXT_TOKENS, Page


def render(page: Page) -> str:
    """The whole file. What came from the trace is escaped; should that ever fail, the page's policy runs no script but ours
    and loads nothing."""
    folder = files("intentkv.report") / "page"
    html, style, script = (
        (folder / f"report.{kind}").read_text(encoding="utf-8").strip() for kind in ("html", "css", "js")
    )
    environment = Environment(
        loader=DictLoader({"report.html": html}), autoescape=True, undefined=StrictUndefined, trim_blocks=True
    )
    environment.filters["visible"] = visible
    return environment.get_template("report.html").render(
        page=page,
        style=Markup(style),
        script=Markup(script),
        style_hash=_hash(style),
        script_hash=_hash(script),
        text_tokens=TEXT_TOKENS,
        width=charts.WIDTH,
        height=charts.HEIGHT,
        left=charts.LEFT,
        right=charts.RIGHT,
        bottom=charts.BOTTOM,
    )


def _hash(text: str) -> str:
    return "sha256-" + base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
