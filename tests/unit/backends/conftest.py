"""Fixtures for tests of backends."""

from __future__ import annotations

import pytest

from icechunk_async_local import filesystems


@pytest.fixture(autouse=True)
def nothing_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    """Forget which file systems were seen to work."""
    monkeypatch.setattr(filesystems, "_fine", set[tuple[int, int]]())
