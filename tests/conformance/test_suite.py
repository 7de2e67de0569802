"""The conformance suite as a stranger meets it: what it refuses, and what it reports."""

from __future__ import annotations

import subprocess
import sys
from typing import TYPE_CHECKING, Any
from uuid import uuid4

import pytest

from icechunk_async.errors import UnsafeStorageError
from icechunk_async.storage import Capabilities, Data, Expected, Version
from icechunk_async.testing.conformance import StorageConformance
from icechunk_async.testing.conformance.conditional import ConditionalPromises
from tests.conformance.flawed import Flawed, opened

if TYPE_CHECKING:
    from pathlib import Path

NAME = "test_a_put_replaces_the_whole_object"
OTHER = "test_an_empty_object_is_an_object"

STRANGER = '''
from uuid import uuid4

import pytest_asyncio

from icechunk_async.storage import open_storage
from icechunk_async.testing.conformance import StorageConformance
from icechunk_async_memory import MemoryStorage


class Shelf(MemoryStorage):
    """Writes over the beginning of what is there."""

    async def put(self, key, data, *, if_version=None):
        try:
            old = bytes((await self.get(key)).data)
        except Exception:
            old = b""
        data = bytes(data)
        return await super().put(key, data + old[len(data) :], if_version=if_version)


class TestShelf(StorageConformance):
    deviations = {DEVIATIONS}

    @pytest_asyncio.fixture
    async def storage(self):
        async with open_storage(f"memory://{uuid4()}") as memory:
            yield Shelf(memory.description.url, memory._space)
'''


def run_stranger(
    folder: Path, deviations: dict[str, str], *names: str
) -> subprocess.CompletedProcess[str]:
    """Run the suite in a separate project, in the strict mode of pytest-asyncio."""
    source = STRANGER.replace("{DEVIATIONS}", repr(deviations))
    (folder / "test_shelf.py").write_text(source, encoding="utf-8")
    (folder / "pytest.ini").write_text("[pytest]\nasyncio_mode = strict\n", encoding="utf-8")
    chosen = [f"test_shelf.py::TestShelf::{name}" for name in names]
    return subprocess.run(
        [sys.executable, "-m", "pytest", "-rxX", "-p", "no:cacheprovider", *chosen],
        cwd=folder,
        capture_output=True,
        encoding="utf-8",
        check=False,
        timeout=240,
    )


def test_a_broken_promise_is_reported_with_its_values(tmp_path: Path) -> None:
    """In a stranger's repository the failure shows what was read and what was expected."""
    done = run_stranger(tmp_path, {}, NAME, OTHER)
    assert "1 failed, 1 passed" in done.stdout
    assert "assert (b'shortg first body', 17) == (b'short', 5)" in done.stdout


def test_a_known_deviation_is_an_expected_failure(tmp_path: Path) -> None:
    """It is reported with its reason, and the run succeeds."""
    done = run_stranger(tmp_path, {NAME: "the shelf cannot shorten a book"}, NAME, OTHER)
    assert "1 passed, 1 xfailed" in done.stdout
    assert "the shelf cannot shorten a book" in done.stdout
    assert done.returncode == 0


def test_a_deviation_that_no_longer_holds_fails(tmp_path: Path) -> None:
    """A promise that is kept may not be listed as broken."""
    done = run_stranger(tmp_path, {OTHER: "shelves are never empty"}, OTHER)
    assert "1 failed" in done.stdout
    assert "XPASS(strict)" in done.stdout


def test_without_pytest_the_suite_says_what_to_install() -> None:
    """The error names the packages, instead of a traceback of an import."""
    for module in ("pytest", "pytest_asyncio"):
        code = (
            f"import sys; sys.modules[{module!r}] = None\nimport icechunk_async.testing.conformance"
        )
        done = subprocess.run(
            [sys.executable, "-c", code],
            capture_output=True,
            encoding="utf-8",
            check=False,
            timeout=240,
        )
        assert "MissingDriverError" in done.stderr
        assert "pip install pytest pytest-asyncio" in done.stderr


def make_suite(*bases: type, **members: Any) -> type[StorageConformance]:
    """Make a subclass of the suite."""
    return type("TestMine", (*bases, StorageConformance), members)


def test_a_test_cannot_be_replaced() -> None:
    """Neither in the class, nor by switching it off, nor through another base."""

    async def always_passes(self: object, storage: object) -> None:
        """Prove nothing."""

    for replacement in (always_passes, None):
        with pytest.raises(TypeError, match=NAME):
            make_suite(**{NAME: replacement})
        with pytest.raises(TypeError, match=NAME):
            make_suite(type("Mixin", (), {NAME: replacement}))
    child = make_suite()
    with pytest.raises(TypeError, match="deviations"):
        type("TestChild", (child,), {NAME: always_passes})


def test_an_unknown_deviation_is_refused() -> None:
    """A reason for a test that does not exist is a spelling mistake."""
    with pytest.raises(TypeError, match="test_that_is_not_there"):
        make_suite(deviations={"test_that_is_not_there": "reason"})


def test_deviations_do_not_leak_into_other_classes() -> None:
    """The mark is on a copy; a child has its own deviations."""
    deviating = make_suite(deviations={NAME: "reason"})
    child = type("TestChild", (deviating,), {"deviations": {OTHER: "another"}})
    plain = make_suite()
    assert marks(deviating, NAME) == ["reason"]
    assert marks(deviating, OTHER) == marks(child, NAME) == marks(plain, NAME) == []
    assert marks(child, OTHER) == ["another"]


class Limited(Flawed):
    """Has no conditional writes, and says so."""

    @property
    def capabilities(self) -> Capabilities:
        """Promise less."""
        reason = "the shelf has no lock"
        return Capabilities(
            conditional_create=False,
            conditional_update=False,
            shared=False,
            reasons=dict.fromkeys(("conditional_create", "conditional_update", "shared"), reason),
        )

    async def put(self, key: str, data: Data, *, if_version: Expected = None) -> Version:
        """Refuse conditions."""
        if if_version is not None:
            raise UnsafeStorageError("the shelf has no lock")
        return await self.inner.put(key, data)


@pytest.mark.parametrize(
    "name", [name for name in vars(ConditionalPromises) if name.startswith("test_")]
)
async def test_a_missing_capability_is_never_passed_over(name: str) -> None:
    """Its tests are skipped with the backend's reason, but for the one that wants a refusal."""
    async with opened(Limited, f"memory://{uuid4()}") as storage:
        test: Any = getattr(make_suite()(), name)
        if name == "test_conditional_writes_that_are_not_promised_are_refused":
            await test(storage)
        else:
            with pytest.raises(pytest.skip.Exception, match="the shelf has no lock"):
                await test(storage)


def marks(suite: type, name: str) -> list[str]:
    """Return the reasons for which a test is expected to fail."""
    found = getattr(getattr(suite, name), "pytestmark", [])
    return [mark.kwargs["reason"] for mark in found if mark.name == "xfail"]
