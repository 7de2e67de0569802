"""Prepare pytest before the suite is imported; importing this module does it."""

from __future__ import annotations

from importlib import import_module
from importlib.util import find_spec
from typing import Final

from icechunk_async.errors import MissingDriverError

__all__: list[str] = []

_WITH_ASSERTIONS: Final = (
    *("_base", "conditional", "keys", "lifetime", "listing", "reads", "writes"),
)


def _prepare() -> None:
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


_prepare()
