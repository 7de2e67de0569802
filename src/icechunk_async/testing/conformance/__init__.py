"""The promises of a storage as tests, for backends of this library and of anyone else.

A backend's author writes a subclass with one fixture::

    class TestShelf(StorageConformance):
        @pytest_asyncio.fixture
        async def storage(self) -> AsyncIterator[Storage]:
            async with open_storage(f"shelf://bucket/{uuid4()}") as storage:
                yield storage

The storage of each test must be empty and writable. `StorageConformance` describes what else a
subclass may set.
"""

from __future__ import annotations

from importlib import import_module
from importlib.util import find_spec
from typing import Final

from icechunk_async.errors import MissingDriverError

__all__ = ["StorageConformance"]

_WITH_ASSERTIONS: Final = (
    *("_base", "conditional", "keys", "lifetime", "listing", "reads", "writes"),
)


def _prepare_pytest() -> None:
    for module, package in (("pytest", "pytest"), ("pytest_asyncio", "pytest-asyncio")):
        if find_spec(module) is None:
            raise MissingDriverError(
                f"The conformance suite needs {package}, which is not installed. Install it "
                "with: pip install pytest pytest-asyncio",
                module=module,
            )
    # Failed assertions then show their values in any repository.
    pytest = import_module("pytest")
    pytest.register_assert_rewrite(*(f"{__package__}.{name}" for name in _WITH_ASSERTIONS))


# Before the suite is imported: pytest rewrites assertions of modules that it has not seen yet.
_prepare_pytest()

from icechunk_async.testing.conformance.suite import StorageConformance  # noqa: E402 -- see above
