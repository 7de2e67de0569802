"""Links of the built site lead to pages and places in them; every page can be reached."""

from __future__ import annotations

from html.parser import HTMLParser
from typing import TYPE_CHECKING
from urllib.parse import unquote, urldefrag, urljoin, urlsplit

import pytest

from tests.docs.run_page import REPOSITORY

if TYPE_CHECKING:
    from pathlib import Path

SITE = REPOSITORY / "site"
_BASE = "http://site/"


class Page(HTMLParser):
    """The links of a page, and the places in it."""

    def __init__(self, text: str) -> None:
        """Read a page."""
        super().__init__()
        self.links: list[str] = []
        self.places: set[str] = set()
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        """Keep links and ids."""
        for name, value in attrs:
            if name == "id" and value:
                self.places.add(value)
            is_link = name in {"href", "src"} or (tag == "a" and name == "name")
            if is_link and value and tag in {"a", "img", "link", "script"}:
                self.links.append(value)


@pytest.fixture(scope="module")
def pages() -> dict[str, Page]:
    """Return all pages by path."""
    found = {
        str(it.relative_to(SITE).as_posix()): Page(it.read_text(encoding="utf-8"))
        for it in SITE.rglob("*.html")
    }
    if len(found) < 10:
        pytest.fail("The site is not built: run 'zensical build --strict' first.")
    return found


def _file(path: str) -> str:
    path = unquote(path.lstrip("/"))
    return f"{path}index.html" if path.endswith("/") or not path else path


def test_links_lead_somewhere(pages: dict[str, Page]) -> None:
    """To a file, and to a place in it if they name one; those to other sites are not followed."""
    broken: list[str] = []
    for name, page in pages.items():
        if name == "404.html":  # is shown under any path
            continue
        here = urljoin(_BASE, name.removesuffix("index.html"))
        for link in page.links:
            target, place = urldefrag(urljoin(here, link))
            parts = urlsplit(target)
            if parts.netloc != "site" or parts.scheme != "http":
                continue
            file = _file(parts.path)
            if not (SITE / file).is_file():
                broken.append(f"{name}: {link}")
            elif place and file in pages and unquote(place) not in pages[file].places:
                broken.append(f"{name}: {link} (no such place)")
    assert broken == []


def test_every_page_can_be_reached_from_the_first(pages: dict[str, Page]) -> None:
    """By links, navigation included; a page that is left out of it is found by nobody."""
    seen, pending = set[str](), ["index.html"]
    while pending:
        name = pending.pop()
        if name in seen or name not in pages:
            continue
        seen.add(name)
        here = urljoin(_BASE, name.removesuffix("index.html"))
        for link in pages[name].links:
            parts = urlsplit(urldefrag(urljoin(here, link))[0])
            if parts.netloc == "site":
                pending.append(_file(parts.path))
    assert set(pages) - seen == {"404.html"}


def test_pages_of_the_source_are_pages_of_the_site(pages: dict[str, Page]) -> None:
    """All of them, also those that navigation forgot."""
    docs = REPOSITORY / "docs"

    def built(page: Path) -> str:
        path = page.relative_to(docs).with_suffix("").as_posix()
        return (
            f"{path.removesuffix('index')}index.html"
            if path.endswith("index")
            else (f"{path}/index.html")
        )

    assert {built(it) for it in docs.rglob("*.md")} == set(pages) - {"404.html"}


def test_search_knows_every_section(pages: dict[str, Page]) -> None:
    """Its index is not empty and names pages of the site."""
    index = (SITE / "search.json").read_text(encoding="utf-8")
    for words in ("rollback", "Back up and restore", "Serve from FastAPI", "Packing"):
        assert words in index
    assert len(index) > 100_000
    assert pages
