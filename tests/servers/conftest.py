"""The output of servers beside a failure, and tests too slow for every run."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final
from zlib import crc32

import pytest

from tests.servers.process import ServerProcess

if TYPE_CHECKING:
    from collections.abc import Generator

THOUSANDS_OF_REQUESTS: Final = frozenset(
    {
        "test_a_cancelled_listing_changes_nothing",
        "test_a_group_of_many_keys_is_listed_once",
        "test_a_listing_can_be_left_half_way",
        "test_a_long_listing_can_be_continued",
        "test_keys_that_stay_are_listed_once_while_others_change",
        "test_many_objects_are_deleted_at_once",
        "test_objects_can_be_deleted_while_they_are_listed",
    }
)
"""They take seconds on a quick server, and minutes on others or with retries."""


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Leave thousands of slow requests, and what another service shows, to those who ask."""
    for item in items:
        half = getattr(getattr(item, "cls", None), "half", None)
        if half is not None and crc32(item.name.encode()) % 2 != half:
            item.add_marker(pytest.mark.thorough)
        many = isinstance(item, pytest.Function) and item.originalname in THOUSANDS_OF_REQUESTS
        if many and item.get_closest_marker("slow_requests") is not None:
            item.add_marker(pytest.mark.thorough)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: Any) -> Generator[None, Any, Any]:
    """Show what the servers of a test printed where it fails."""
    report = yield
    if report.failed:
        for name, value in getattr(item, "funcargs", {}).items():
            if isinstance(value, ServerProcess):
                report.sections.append((f"log of {name}", value.tail()))
    return report
