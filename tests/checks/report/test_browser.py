"""The page as a real browser lays it out: narrow, wide, light, dark; nothing from outside."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from report.browser import Browser, find
from report.results import EVERYTHING, EVIL, finding, lines

from samebits import cli

pytestmark = [
    pytest.mark.reference,
    pytest.mark.skipif(find() is None, reason="needs a headless Chromium"),
]

# WCAG 2, level AA, for text of ordinary size.
CONTRAST = 4.5
# Every text of the page with its colour and the first background behind it that is not see-through.
COLOURS = """
[...document.querySelectorAll("body *")].filter(e => [...e.childNodes].some(
  n => n.nodeType === 3 && n.data.trim())).map(e => {
  let behind = e; const clear = "rgba(0, 0, 0, 0)";
  while (behind.parentElement && getComputedStyle(behind).backgroundColor === clear)
    behind = behind.parentElement;
  return [e.textContent.slice(0, 30), getComputedStyle(e).color,
          getComputedStyle(behind).backgroundColor];
})
"""


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("report")
    results, out = folder / "results.jsonl", folder / "out.html"
    many = [
        finding(implementation=f"implementation-{i}", model=f"m.{'Long' * 9}{j}", measured=0.1 * i)
        for i in range(9)
        for j in range(3)
    ]
    results.write_text(lines([*EVERYTHING, *many]))
    assert cli.main(["report", str(out), str(results)]) == 1
    return out


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    program = find()
    assert program is not None
    with Browser(program, tmp_path_factory.mktemp("profile")) as running:
        yield running


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [360, 1280])
def test_nothing_overflows_and_all_can_be_read(
    browser: Browser, page: Path, width: int, scheme: str
) -> None:
    browser.show(page, width=width, scheme=scheme)

    assert browser.ask("document.documentElement.scrollWidth") <= width
    # A table that is wider than the window scrolls in a frame of its own.
    assert browser.ask("document.querySelectorAll('table').length") >= 6
    loose = "[...document.querySelectorAll('table')].filter(t => !t.closest('.scroll')).length"
    assert browser.ask(loose) == 0
    pale = [
        (text, color, behind)
        for text, color, behind in browser.ask(COLOURS)
        if _contrast(color, behind) < CONTRAST
    ]
    assert pale == []
    light = _luminance(browser.ask("getComputedStyle(document.body).backgroundColor"))
    assert (light > 0.5) == (scheme == "light")


def test_nothing_is_loaded_and_nothing_runs(browser: Browser, page: Path) -> None:
    browser.events.clear()

    browser.show(page, width=1280, scheme="light")

    requested = [_url(e) for e in browser.events if e["method"] == "Network.requestWillBeSent"]
    assert [url for url in requested if not url.startswith("data:")] == [page.as_uri()]
    # Neither a dialogue of a script nor a complaint that one was stopped.
    said = {"Page.javascriptDialogOpening", "Log.entryAdded", "Runtime.exceptionThrown"}
    assert [e for e in browser.events if e["method"] in said] == []
    assert browser.ask("document.scripts.length") == 0
    assert browser.ask("document.body.innerText").count(EVIL) >= 3


def test_the_links_lead_somewhere(browser: Browser, page: Path) -> None:
    browser.show(page, width=1280, scheme="light")

    dead = "[...document.links].filter(a => !document.querySelector(a.hash)).length"
    assert browser.ask("document.links.length") == 6
    assert browser.ask(dead) == 0


def _url(event: dict[str, Any]) -> str:
    url: str = event["params"]["request"]["url"]
    return url


def _contrast(one: str, other: str) -> float:
    low, high = sorted((_luminance(one), _luminance(other)))
    return (high + 0.05) / (low + 0.05)


def _luminance(color: str) -> float:
    """Return the relative luminance of "rgb(r, g, b)", as WCAG 2 defines it."""
    channels = [int(part) / 255 for part in color.strip("rgba()").split(",")[:3]]
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in channels]
    return sum(weight * c for weight, c in zip((0.2126, 0.7152, 0.0722), linear, strict=True))
