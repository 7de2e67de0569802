"""What servers printed, beside a failure."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from tests.servers.process import ServerProcess

if TYPE_CHECKING:
    from collections.abc import Generator


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: Any) -> Generator[None, Any, Any]:
    """Show what the servers of a test printed where it fails."""
    report = yield
    if report.failed:
        for name, value in getattr(item, "funcargs", {}).items():
            if isinstance(value, ServerProcess):
                report.sections.append((f"log of {name}", value.tail()))
    return report
