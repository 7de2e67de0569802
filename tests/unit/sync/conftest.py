"""A cluster of Dask for the tests of this directory, which ends with them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from tests.unit.dask_processes import local_cluster

if TYPE_CHECKING:
    from collections.abc import Iterator


@pytest.fixture(scope="package")
def cluster() -> Iterator[Any]:
    """Two workers, which are processes; also idle ones take a part of a core."""
    with local_cluster() as cluster:
        yield cluster
