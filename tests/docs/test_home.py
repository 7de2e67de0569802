"""The history on the home page is the one that the library draws."""

from __future__ import annotations

from tools import home


def test_the_history_on_the_home_page_is_drawn_by_this_version() -> None:
    """`python -m tools.home` brings it up to date."""
    page = home.page()
    assert "(<tspan" in page
    assert home.PAGE.read_text(encoding="utf-8") == page
