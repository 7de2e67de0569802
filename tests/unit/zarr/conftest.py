"""Zarr's suites: where a test cannot hold for this store, why is data, not an override."""

from __future__ import annotations

import pytest


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Make a class's ``deviations``, reasons by test name, strict expected failures."""
    for item in items:
        deviations = getattr(getattr(item, "cls", None), "deviations", {})
        reason = deviations.get(getattr(item, "originalname", item.name))
        if reason is not None:
            item.add_marker(pytest.mark.xfail(reason=reason, strict=True))
