"""All promises as one class, so that a backend cannot pass by leaving some out."""

from __future__ import annotations

from types import FunctionType
from typing import TYPE_CHECKING, Any, ClassVar, Final

import pytest

from icechunk_async.testing.conformance.conditional import ConditionalPromises
from icechunk_async.testing.conformance.keys import KeyPromises
from icechunk_async.testing.conformance.lifetime import CancellationPromises, LifetimePromises
from icechunk_async.testing.conformance.listing import ListingPromises, PagingPromises
from icechunk_async.testing.conformance.reads import ReadPromises
from icechunk_async.testing.conformance.writes import CopyPromises, DeletePromises, WritePromises

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = ["StorageConformance"]


@pytest.mark.asyncio
class StorageConformance(
    KeyPromises,
    ReadPromises,
    WritePromises,
    ConditionalPromises,
    DeletePromises,
    CopyPromises,
    ListingPromises,
    PagingPromises,
    CancellationPromises,
    LifetimePromises,
):
    """One test for each promise of `Storage`.

    A subclass has an asynchronous fixture ``storage``: an open, empty, writable storage for each
    test. It may also say

    * ``deviations``: the promises that the backend is known to break, each with a reason. Those
    tests must fail: once one passes, its entry must be removed.
    * ``reopen``: opens another handle on the same objects, if not through the entry point of the
    backend.
    * ``undeletable``: a block in which deleting one key fails.
    * ``many_keys``, ``large_bytes``: sizes, if the usual ones take too long; ``page_keys``, if
      the service lists fewer keys at a time than most, or if there are no pages.

    The tests themselves cannot be replaced.
    """

    deviations: ClassVar[Mapping[str, str]] = {}

    def __init_subclass__(cls, **arguments: object) -> None:
        """Raise an error for replaced tests and unknown deviations, and mark the known ones.

        Raises:
            TypeError: a test of the suite is replaced, or there is no test of a given name.
        """
        super().__init_subclass__(**arguments)
        for name, test in _TESTS.items():
            # By the function, not by the name of the class: a mixin that comes first could replace
            # it as well.
            if _without_mark(getattr(cls, name)) is not test:
                raise TypeError(
                    f"{cls.__qualname__} replaces {name}, a test of the conformance suite. Give "
                    f"the reason in `deviations` instead: deviations = {{{name!r}: '...'}}."
                )
        unknown = sorted(set(cls.deviations) - set(_TESTS))
        if unknown:
            raise TypeError(
                f"{cls.__qualname__}.deviations names {', '.join(unknown)}, and the conformance "
                "suite has no such test. Correct the name, or remove it."
            )
        for name, test in _TESTS.items():
            if name in cls.deviations:
                setattr(cls, name, _expected_to_fail(test, cls.deviations[name]))
            elif getattr(cls, name) is not test:
                setattr(cls, name, test)  # a deviation that a base class has and this one not


_TESTS: Final[Mapping[str, FunctionType]] = {
    name: test
    for group in StorageConformance.__mro__
    for name, test in vars(group).items()
    if name.startswith("test_")
}

_ORIGINAL: Final = "__icechunk_original__"


def _expected_to_fail(test: FunctionType, reason: str) -> Any:
    """Return a copy of a test that must fail: marks belong to the function, not to the class."""
    # Other backends share the function, and a mark on it would be a mark on theirs.
    copy = FunctionType(
        test.__code__, test.__globals__, test.__name__, test.__defaults__, test.__closure__
    )
    copy.__dict__.update(test.__dict__)
    copy.__kwdefaults__ = test.__kwdefaults__
    copy.__qualname__, copy.__doc__ = test.__qualname__, test.__doc__
    copy.__annotations__ = dict(test.__annotations__)
    setattr(copy, _ORIGINAL, test)
    return pytest.mark.xfail(reason=reason, strict=True)(copy)


def _without_mark(test: object) -> object:
    return getattr(test, _ORIGINAL, test)
