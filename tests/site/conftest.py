"""A browser, and files served to it; tests without it are skipped, and fail in CI."""

from __future__ import annotations

import functools
import http.server
import os
import shutil
import threading
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, NoReturn, override

import pytest

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

SIZES = {"phone": (360, 740), "desktop": (1280, 900)}


def missing(program: str, how: str) -> NoReturn:
    """Skip the test, with a reason that pytest and tox show at the end; in CI, fail it."""
    text = f"{program} is not here, so that nobody looks at the pages: {how}"
    if os.environ.get("CI"):
        pytest.fail(text)
    pytest.skip(text)


class _Quiet(http.server.SimpleHTTPRequestHandler):
    @override
    def log_message(self, format: str, *args: Any) -> None:
        pass


@contextmanager
def serving(folder: Path) -> Iterator[str]:
    """Serve a folder on this machine; return its URL."""
    handler = functools.partial(_Quiet, directory=str(folder))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}"
        finally:
            server.shutdown()
            thread.join()


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    """Start headless Chromium."""
    try:
        from playwright.sync_api import Error, sync_playwright
    except ModuleNotFoundError:
        missing("playwright", "pip install playwright")
    with sync_playwright() as playwright:
        try:
            started = playwright.chromium.launch(
                executable_path=shutil.which("chromium"), args=["--no-sandbox"]
            )
        except Error as error:
            missing("Chromium", f"apt-get install chromium, or playwright install: {error}")
        yield started
        started.close()


def opened(browser: Any, device: str, scheme: str = "light") -> tuple[Any, list[str]]:
    """Return a page of a size and colour scheme, and the list that its problems are noted in."""
    width, height = SIZES[device]
    page = browser.new_page(viewport={"width": width, "height": height}, color_scheme=scheme)
    problems: list[str] = []
    page.on("pageerror", lambda error: problems.append(str(error)))
    # Going to the next page aborts what the last one was still loading.
    page.on(
        "requestfailed",
        lambda it: problems.append(f"{it.url}: {it.failure}") if "ABORTED" not in it.failure else 0,
    )
    page.on(
        "response",
        lambda it: problems.append(f"{it.url}: {it.status}") if it.status >= 400 else None,
    )
    return page, problems


def picture(page: Any, name: str) -> None:
    """Take a picture, if ``SCREENSHOTS`` in the environment names a folder for them."""
    folder = os.environ.get("SCREENSHOTS")
    if folder:
        page.screenshot(path=os.path.join(folder, f"{name}.png"))  # noqa: PTH118 -- a text
