"""The page in a real browser: nothing loaded, nothing complained about, usable from the keyboard, harmless whatever the
trace says."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from transformers import AutoTokenizer

from intentkv.evals.model import model_path
from intentkv.report.command import write_report
from tests.report.chromium import Browser, find_chromium
from tests.report.traces import Teller

pytestmark = pytest.mark.skipif(find_chromium() is None, reason="needs Chromium: apt-get install chromium")

HOSTILE = (
    "</script><script>document.title='owned'</script>",
    "<img src=x onerror=\"document.title='owned'\">",
    "\"><svg onload=document.title='owned'>{{ 7*7 }}",
    "a\x00b\u202egnp.exe\u2066 \x1b[31m",
)


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    program = find_chromium()
    assert program is not None
    one = Browser(program, tmp_path_factory.mktemp("chromium"))
    yield one
    one.close()


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three turns of an agent that wants a dropped fact back, and a second session whose names and text are hostile."""
    tokenizer = AutoTokenizer.from_pretrained(model_path())
    folder = tmp_path_factory.mktemp("trace")
    teller = Teller(folder)

    def encode(text: str) -> list[int]:
        return list(tokenizer.encode(text))

    history = encode("You are the clerk. The code for the side gate is KX-402. " + "All went well today, as ever. " * 4)
    for number, question in enumerate(("Say OK.", "And the weather?", "What is the code for the side gate?")):
        ask, answer = encode("\n" + question), encode(" Of course")
        span = (len(history), len(history) + len(ask))
        drop = range(5, 25) if number == 0 else range(25, 30) if number == 2 else ()
        confidence = [0.25] * len(answer) if number == 2 else None
        teller.turn("agent-7", [*history, *ask], answer, query=span, drop=list(drop), confidence=confidence)
        history += ask + answer
    for number, name in enumerate(HOSTILE):
        text = encode(name * 3)
        teller.turn(
            name, text, text[:3], query=(len(text) - 2, len(text)), drop=[2, 3], actions=((number, number + 2),)
        )
    file = teller.close()
    file.write_text(file.read_text() + "{broken\n" + '{"kind":"<b>"}\n')
    return write_report(file, folder / "report.html", str(model_path()))


def test_it_loads_nothing_and_complains_about_nothing(browser: Browser, report: Path) -> None:
    browser.open(report)
    assert browser.requests == [report.as_uri()] and browser.errors == []
    assert browser.js("document.title") == "intentkv report"
    assert "2 lines were skipped" not in browser.js("document.body.innerText")
    for reason in ("1 line was skipped here: it is not JSON.", "1 line was skipped here: its kind is unknown."):
        assert reason in browser.js("document.querySelector('.notice').innerText")


def test_what_was_dropped_and_what_was_wanted_back(browser: Browser, report: Path) -> None:
    browser.open(report)
    dropped = "[...document.querySelectorAll('#s1 [data-g=\"{}\"]')].map(run => run.textContent).join('')"
    assert "The code for the side gate" in browser.js(dropped.format(1))
    assert len(browser.js(dropped.format(3))) > 5
    wants = browser.js("document.querySelector('#s1 .wants').innerText")
    assert wants.strip() == "turn 3: code for the side gate dropped in turn 1"
    link = "document.querySelector('#s1 .wants a')"
    assert browser.js(f"document.getElementById({link}.hash.slice(1)).classList.contains('w')")
    assert "confidence 25 %" in browser.js("document.querySelector('#s1 .turn:last-of-type h4').innerText")


def test_a_turn_is_shown_as_it_was(browser: Browser, report: Path) -> None:
    """The slider takes back later drops, and says how much was live then."""
    browser.open(report)
    grey = "document.querySelectorAll('#s1 .text .d').length"
    at_the_end = browser.js(grey)
    browser.js("document.querySelector('#s1 .asof input').focus()")
    for _ in range(2):
        browser.press("[")
    assert 0 < browser.js(grey) < at_the_end
    assert browser.js("document.querySelector('#s1 output').textContent").startswith("1 of 3: ")
    assert browser.js("document.querySelectorAll('#s1 .turn.later').length") == 2
    browser.press("]")
    assert browser.js("document.querySelector('#s1 output').textContent").startswith("2 of 3: ")


def test_everything_works_from_the_keyboard(browser: Browser, report: Path) -> None:
    browser.open(report)
    browser.press("Tab")
    assert browser.js("document.activeElement.className") == "skip"
    browser.press("n")
    said = browser.js("document.getElementById('inspect').textContent")
    assert "dropped in turn 1" in said and "wanted back by turn 3" in said
    assert browser.js("document.activeElement.className") == "text"
    before = browser.js("document.querySelector('.at').dataset.p")
    browser.press("ArrowRight")
    assert int(browser.js("document.querySelector('.at').dataset.p")) > int(before)
    browser.press("s")
    assert not browser.js("document.body.classList.contains('scores') || document.getElementById('scores').checked")
    browser.press("Escape")
    assert browser.js("document.getElementById('inspect').hidden")


def test_light_dark_and_paper(browser: Browser, report: Path, tmp_path: Path) -> None:
    browser.open(report)
    background = "getComputedStyle(document.body).backgroundColor"
    browser.look()
    light = browser.js(background)
    browser.look(dark=True)
    assert browser.js(background) != light == "rgb(252, 252, 251)"
    contrasts = browser.js(CONTRAST)
    browser.look()
    assert min(contrasts + browser.js(CONTRAST)) >= 4.5
    browser.look(dark=True, media="print")
    assert browser.js(background) == "rgb(255, 255, 255)"
    assert browser.js("getComputedStyle(document.querySelector('.asof')).display") == "none"
    assert browser.pdf().startswith(b"%PDF")
    browser.look()
    browser.screenshot(tmp_path / "light.png")
    assert (tmp_path / "light.png").read_bytes().startswith(b"\x89PNG")


# Contrast (WCAG 2) of body text, muted text and dropped text with the panel behind it.
CONTRAST = """(() => {
  const light = (text) => { const [r, g, b] = text.match(/[\\d.]+/g).slice(0, 3).map(v => v / 255)
      .map(v => v <= .03928 ? v / 12.92 : ((v + .055) / 1.055) ** 2.4); return .2126 * r + .7152 * g + .0722 * b; };
  document.body.classList.remove('scores');
  const panel = light(getComputedStyle(document.querySelector('.text')).backgroundColor);
  return ['.text', '.text .d', '.hint'].map(name => light(getComputedStyle(document.querySelector(name)).color))
      .map(ink => (Math.max(ink, panel) + .05) / (Math.min(ink, panel) + .05));
})()"""


def test_hostile_names_and_text_are_text(browser: Browser, report: Path) -> None:
    browser.open(report)
    for number in range(2, 2 + len(HOSTILE)):
        browser.js(f"location.hash = 's{number}'")
    assert browser.js("document.title") == "intentkv report"
    assert (
        browser.js(
            "document.querySelectorAll('main script, main img, main svg svg, [onload], [onerror], main b').length"
        )
        == 0
    )
    assert (
        browser.js("document.querySelectorAll('svg').length") == 2
    )  # the pool's, and the one session's of several turns
    names = browser.js("[...document.querySelectorAll('.session h2')].map(name => name.firstChild.textContent.trim())")
    assert names[1:4] == list(HOSTILE[:3]) and names[4] == "a␀b⟨U+202E⟩gnp.exe⟨U+2066⟩ ␛[31m"
    assert browser.js("!/[\\u0000\\u202e\\u2066\\u001b]/.test(document.documentElement.outerHTML)")
    assert browser.errors == [] and browser.requests == [report.as_uri()]


def test_the_policy_of_the_page_stops_what_escaping_would_miss(browser: Browser, report: Path, tmp_path: Path) -> None:
    """Even markup put into the file by hand runs no script and loads nothing."""
    planted = (
        "<script>document.title='owned'</script><img src='http://127.0.0.1:9/x' onerror=\"document.title='owned'\">"
    )
    page = tmp_path / "planted.html"
    page.write_text(report.read_text().replace("<main>", f"<main>{planted}"))
    browser.open(page)
    assert browser.js("document.title") == "intentkv report" and len(browser.errors) >= 2
