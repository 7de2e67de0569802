"""The built site as its readers see it: on phones and desktops, light and dark, and searched."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from tests.site.conftest import SIZES, opened, picture, serving
from tests.site.test_links import SITE

if TYPE_CHECKING:
    from collections.abc import Iterator

_TALLEST = 60_000
"""Pixels; longer pages are split, or say less."""
LOOKED_AT = {
    "home": "/",
    "undo": "/how-to/restore/",
    "compared": "/compared-with/",
    "repository": "/reference/api/repository/",
    "errors": "/reference/errors/",
}


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    """Serve the site that was built last."""
    if not (SITE / "index.html").exists():
        pytest.fail("The site is not built: run 'zensical build --strict' first.")
    with serving(SITE) as url:
        yield url


@pytest.mark.parametrize("device", SIZES)
def test_pages_fit_the_screen(url: str, browser: Any, device: str) -> None:
    """None scrolls sideways, is endless, or asks for something that is not there."""
    page, problems = opened(browser, device)
    wrong: list[str] = []
    for file in sorted(SITE.rglob("index.html")):
        path = file.parent.relative_to(SITE).as_posix()
        page.goto(f"{url}/" if path == "." else f"{url}/{path}/")
        width, height = page.evaluate(
            "[document.documentElement.scrollWidth, document.documentElement.scrollHeight]"
        )
        if width > SIZES[device][0]:
            wrong.append(f"{path}: {width} pixels wide")
        if height > _TALLEST:
            wrong.append(f"{path}: {height} pixels high")
    page.close()
    assert wrong == []
    assert problems == []


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("device", SIZES)
@pytest.mark.parametrize("name", LOOKED_AT)
def test_five_pages_are_readable(
    url: str, browser: Any, name: str, device: str, scheme: str
) -> None:
    """Paper and ink follow the system, navigation tells where one is, code can be copied.

    With ``SCREENSHOTS`` in the environment, pictures of the pages go into that folder.
    """
    page, problems = opened(browser, device, scheme)
    page.goto(f"{url}{LOOKED_AT[name]}")
    colours = page.evaluate(
        "[getComputedStyle(document.body).backgroundColor,"
        " getComputedStyle(document.querySelector('article p')).color]"
    )
    paper, ink = (sum(map(int, it[it.index("(") + 1 : -1].split(",")[:3])) for it in colours)
    assert (paper > ink) == (scheme == "light")
    assert abs(paper - ink) > 300
    assert page.locator("article h1").count() == 1
    if device == "desktop":
        assert page.locator(".md-tabs__item--active").count() == 1
    if name in {"home", "undo"}:
        page.locator(".md-clipboard, [data-clipboard-target], .md-code__button").first.wait_for(
            state="attached"
        )
    picture(page, f"{name}-{device}-{scheme}")
    page.close()
    assert problems == []


@pytest.mark.parametrize(
    ("words", "path"),
    [
        ("rollback", "/how-to/restore/"),
        ("undo", "/how-to/restore/"),
        ("time travel", "/how-to/restore/"),
        ("backup", "/how-to/back-up-and-copy/"),
        ("restore", "/how-to/back-up-and-copy/"),
        ("retention", "/how-to/upkeep/"),
        ("garbage", "/how-to/upkeep/"),
        ("fastapi", "/how-to/serve-over-http/"),
        ("concurrent writers", "/how-to/several-writers/"),
        ("netcdf", "/how-to/virtual-data/"),
        ("duckdb", "/how-to/sql/"),
        ("delta lake", "/compared-with/"),
        ("limits", "/reference/limits/"),
        ("faq", "/faq/"),
        ("chunk size", "/how-to/choose-sizes/"),
        ("minio", "/how-to/s3/"),
    ],
)
def test_search_finds_the_words_of_users(url: str, browser: Any, words: str, path: str) -> None:
    """The page is among the first ten results."""
    page, problems = opened(browser, "desktop")
    page.goto(f"{url}/")
    box = page.locator("input[aria-label='Search']")  # in an open shadow root, which locators enter
    box.wait_for(state="attached", timeout=10_000)  # before, keys are not listened to
    page.keyboard.press("Control+k")
    box.fill(words, timeout=10_000)
    found = "a[href*='?h=']"
    page.locator(found).first.wait_for(timeout=10_000)
    results = page.locator(found).evaluate_all("all => all.map(it => it.pathname)")
    page.close()
    assert path in results[:10]
    assert problems == []
