"""The pages of snapshots in a browser: on a phone and a desktop, light and dark."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from tests.gateway.conftest import missing

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.unit.gateway.serving import Server

_SIZES = {"phone": (390, 844), "desktop": (1280, 800)}


# Of this module alone: while it runs, so does an event loop on this thread.
@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    """Start headless Chromium."""
    program = shutil.which("chromium")
    try:
        from playwright.sync_api import Error, sync_playwright
    except ModuleNotFoundError:
        missing("playwright", "pip install playwright")
    with sync_playwright() as playwright:
        try:
            started = playwright.chromium.launch(executable_path=program, args=["--no-sandbox"])
        except Error as error:
            missing("Chromium", f"apt-get install chromium, or playwright install: {error}")
        yield started
        started.close()


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("device", _SIZES)
def test_a_page_shows_a_snapshot(server: Server, browser: Any, device: str, scheme: str) -> None:
    """Tree, history, changes and a picture, without scrolling sideways and without an error.

    With ``SCREENSHOTS`` in the environment, pictures of the pages go into that folder.
    """
    width, height = _SIZES[device]
    page = browser.new_page(viewport={"width": width, "height": height}, color_scheme=scheme)
    problems: list[str] = []
    asked: list[tuple[str, int]] = []
    page.on("console", lambda message: problems.append(message.text))
    page.on("pageerror", lambda error: problems.append(str(error)))
    page.on("response", lambda it: asked.append((it.url, it.status)))
    page.goto(f"{server.url}/")
    with page.expect_navigation():  # a click does not wait for the page that it leads to
        page.click("text=main")
    assert page.url == f"{server.url}/@branch.main/"
    assert page.title() == "Branch main"
    headings = [it.inner_text() for it in page.query_selector_all("h2")]
    assert headings == ["Groups and arrays", "Values", "Changes since the parent", "History"]
    text = page.inner_text("body")
    for words in ("t2m", "time: 3, lat: 24, lon: 40", "chunks of", "Three days", "<last> day"):
        assert words in text
    drawn = page.evaluate(
        "Array.from(document.images, it => [it.naturalWidth, it.naturalHeight, it.clientWidth])"
    )
    assert [it[:2] for it in drawn] == [[40, 24]]
    assert drawn[0][2] > 300
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    paper = page.evaluate("getComputedStyle(document.body).backgroundColor")
    assert (sum(map(int, paper[4:-1].split(","))) > 384) == (scheme == "light")
    folder = os.environ.get("SCREENSHOTS")
    if folder:
        name = Path(folder) / f"page-{device}-{scheme}.png"
        page.screenshot(path=name, full_page=True)
    with page.expect_navigation():
        page.click("li:has-text('Three days') a")
    assert page.title().startswith("Snapshot ")
    assert problems == []
    assert [status for _, status in asked] == [200, 200, 200]
    page.close()
