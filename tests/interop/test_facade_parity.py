"""The facade has every public name of the official package, alike but for listed differences."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

import icechunk_async.sync as facade
from tests.interop import official_names, official_table
from tests.interop.facade_differences import DIFFERENT
from tests.interop.theirs import icechunk

if TYPE_CHECKING:
    from tests.interop.official_names import Difference


@pytest.fixture(scope="module")
def found() -> list[Difference]:
    """Return the differences from the installed official package."""
    return official_names.differences()


def test_names_members_and_signatures_are_the_official_ones(found: list[Difference]) -> None:
    """Every difference is listed with a reason."""
    unexpected = [f"{it.name} {it.what}" for it in found if it.name not in DIFFERENT]
    assert not unexpected, "\n".join(unexpected)


def test_what_is_listed_as_different_is(found: list[Difference]) -> None:
    """The list does not outlive its reasons."""
    assert sorted(DIFFERENT) == sorted(it.name for it in found)


def test_the_check_sees_what_is_missing_and_what_takes_other_arguments(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A function, a member and an argument, each taken away."""

    def other(region: str | None = None) -> str | None:
        return region

    def sized(size: int) -> int:
        return size

    monkeypatch.setitem(vars(facade), "s3_store", other)
    monkeypatch.delattr(facade.RepositoryConfig, "merge")
    monkeypatch.setattr(facade.CachingConfig, "default", staticmethod(sized))
    monkeypatch.setitem(vars(facade), "gcs_store", facade.gcs_storage)
    seen = {it.name: it.what for it in official_names.differences()}
    assert seen["RepositoryConfig.merge"] == "is missing"
    assert seen["CachingConfig.default"] == "takes (size), not ()"
    assert seen["s3_store"].startswith("takes (region=None), not (region=None, endpoint_url=None")
    assert "gcs_store" in seen


def test_error_kinds_are_the_official_ones() -> None:
    """The codes by their names."""
    assert {it.name: it.value for it in facade.ErrorKind} == {
        it.name: it.value for it in icechunk.ErrorKind
    }


def test_the_table_of_names_is_up_to_date() -> None:
    """Each official name, where it is here, and a test that shows it; see ``official_table``."""
    assert not official_table.outdated(), "run: python -m tests.interop.official_table"


def test_every_name_has_a_test() -> None:
    """A test uses it; names that are different as well."""
    rows = official_table.rows()
    assert len(rows) > 100
    untested = [row.name for row in rows if not row.tests]
    assert not untested
