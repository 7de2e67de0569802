"""URLs that say that a TileDB array is there."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from icechunk_async.errors import InvalidInputError, InvalidURLError, UnknownSchemeError
from icechunk_async.tiledb import ingest_array, open_array, open_group, write_virtual_array
from icechunk_async.tiledb.arrays.folder import is_tiledb_url, storage_location
from tests.unit.tiledb.archives import ARCHIVES, files_below, filled
from tests.unit.tiledb.virtual_arrays import placed, referring

if TYPE_CHECKING:
    from pathlib import Path

NEWEST = ARCHIVES[-1]
SECRET = "KEY:SECRET"  # noqa: S105 -- of nobody


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ("tiledb+s3://bucket/array", "s3://bucket/array"),
        ("TileDB+S3://bucket/Array", "S3://bucket/Array"),
        ("tiledb+obstore+s3://bucket/array", "obstore+s3://bucket/array"),
        ("tiledb+file:///data/my%20array", "file:///data/my%20array"),
        ("tiledb:///data/array", "file:///data/array"),
        ("s3://bucket/array", "s3://bucket/array"),
        ("tiledb/array", "tiledb/array"),
        ("tiledb+s3/array", "tiledb+s3/array"),
        ("/data/tiledb:1", "/data/tiledb:1"),
    ],
)
def test_storage_is_that_of_the_url_without_tiledb(given: str, expected: str) -> None:
    """Paths and URLs of storage are unchanged."""
    assert storage_location(given) == expected
    assert is_tiledb_url(given) == (given != expected)


@pytest.mark.parametrize(
    ("given", "match"),
    [
        ("tiledb://namespace/array", "cloud service"),
        (f"tiledb://{SECRET}@namespace/array", "cloud service"),
        ("tiledb://", "cloud service"),
        ("tiledb:///", "cloud service"),
        ("tiledb://s3://bucket/array", "cloud service"),
        ("tiledb:/data/array", "no '//' after its scheme"),
        (f"tiledb+s3:{SECRET}@bucket", "no '//' after its scheme"),
        ("tiledb+://bucket/array", "names no storage"),
        (f"tiledb+tiledb+s3://{SECRET}@bucket", "names no storage"),
        ("tiledb+1://bucket", "names no storage"),
    ],
)
async def test_wrong_forms_are_refused_with_the_right_ones(given: str, match: str) -> None:
    """Nothing is opened, and nothing of the URL is repeated that may be secret."""
    for opening in (open_array, open_group):
        with pytest.raises(InvalidURLError, match=match) as refused:
            async with opening(given):
                pass
        assert "'tiledb+s3://bucket/array'" in str(refused.value)
        assert "SECRET" not in f"{refused.value!r} {vars(refused.value)}"


async def test_secrets_in_urls_are_not_repeated_by_the_storage() -> None:
    """Of a backend that knows none in URLs, and of one that does not exist."""
    for url, kind in (
        (f"tiledb+https://{SECRET}@host/array", InvalidURLError),
        ("tiledb+https://host/array?sig=SECRET", InvalidURLError),
        (f"tiledb+swift://{SECRET}@host/array?sig=SECRET", UnknownSchemeError),
    ):
        with pytest.raises(InvalidInputError) as refused:
            async with open_array(url):
                pass
        assert isinstance(refused.value, kind)
        assert "SECRET" not in f"{refused.value!r} {vars(refused.value)}"


async def test_array_is_opened_and_ingested_by_its_url(tmp_path: Path) -> None:
    """References have the URL of the storage, so that any reader and a path find the same."""
    memory = await filled(files_below(NEWEST, "features-0"))
    place = placed(NEWEST, "features-0", tmp_path)
    async with open_array(f"tiledb+{memory}") as array:
        expected = (await array.read(attributes=["a0"]))["a0"]
        assert array.folder.url == memory
    for url in (f"tiledb+{place.as_uri()}", place.as_uri().replace("file", "tiledb")):
        async with open_array(url) as array:
            np.testing.assert_array_equal((await array.read(attributes=["a0"]))["a0"], expected)
    async with referring(place) as repository:
        names: dict[str, Any] = {"attributes": ["a0"], "copy": True}
        (found,) = await ingest_array(repository, f"tiledb+{place.as_uri()}", "grid", **names)
        assert found.referenced > 0
        assert await ingest_array(repository, place, "grid", **names) == ()
        session = await repository.writable_session("main")
        async with open_array(place) as array:
            await write_virtual_array(
                session, array, "other", location=f"tiledb+{place.as_uri()}", **names
            )
        locations = set(await session.all_virtual_chunk_locations())
        assert locations
        assert all(it.startswith(("file://", "vcc://")) for it in locations)
