"""The test server itself, seen by two clients that are not ours: Google's own, and gcsfs."""

from __future__ import annotations

import asyncio
import threading
import warnings
from typing import TYPE_CHECKING, Any, Final

import pytest

from tests.servers.gcs.json_api.asking import Ask
from tests.servers.gcs.json_api.replies import Refusal, select
from tests.servers.gcs.json_api.state import Conditions, State

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # about Python versions and protocols, on import
    from gcsfs.core import GCSFileSystem  # type: ignore[import-untyped, unused-ignore]
    from google.api_core.exceptions import Conflict, NotFound, PreconditionFailed
    from google.auth.credentials import AnonymousCredentials
    from google.cloud import (  # type: ignore[import-untyped, unused-ignore]
        storage as google_storage,
    )
    from google.cloud.storage.exceptions import (  # type: ignore[import-untyped, unused-ignore]
        InvalidResponse,
    )

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterator

    from tests.servers.gcs.running import RunningServer

_MIB: Final = 1 << 20


@pytest.fixture
def google(server: RunningServer, bucket: str) -> Iterator[Any]:
    """Return a bucket of google-cloud-storage."""
    client = google_storage.Client(
        project="tests",
        credentials=AnonymousCredentials(),  # type: ignore[no-untyped-call, unused-ignore]
        client_options={"api_endpoint": server.url},
    )
    yield client.bucket(bucket)
    client.close()


@pytest.fixture
async def gcsfs(server: RunningServer) -> AsyncIterator[Any]:
    """Return a file system of gcsfs."""
    system = GCSFileSystem(
        token="anon",  # noqa: S106 - not a secret
        endpoint_url=server.url,
        allow_http=True,
        asynchronous=True,
        skip_instance_cache=True,
        use_listings_cache=False,
    )
    session = await system._set_session()
    yield system
    await session.close()


class TestGoogleClient:
    """google-cloud-storage."""

    def test_it_writes_and_reads(self, google: Any) -> None:
        """Bytes, checksums (which it verifies), metadata and ranges."""
        blob = google.blob("a folder/ké+y%2F")
        blob.metadata = {"who": "me"}
        blob.upload_from_string(b"0123456789", content_type="text/plain")
        again = google.get_blob("a folder/ké+y%2F")
        assert again.download_as_bytes() == b"0123456789"
        assert again.download_as_bytes(start=2, end=4) == b"234"
        assert (again.metadata, again.content_type, again.size) == ({"who": "me"}, "text/plain", 10)
        assert again.generation == blob.generation

    def test_the_fake_server_checks_preconditions(self, google: Any) -> None:
        """Of each kind, on writes, reads and deletions."""
        blob = google.blob("key")
        blob.upload_from_string(b"one", if_generation_match=0)
        first = blob.generation
        with pytest.raises(PreconditionFailed):
            google.blob("key").upload_from_string(b"two", if_generation_match=0)
        blob.upload_from_string(b"two", if_generation_match=first)
        assert blob.generation > first
        with pytest.raises(PreconditionFailed):
            blob.download_as_bytes(if_generation_match=first)
        with pytest.raises(PreconditionFailed):
            blob.delete(if_generation_match=first)
        with pytest.raises(NotFound):
            google.blob("key", generation=first).download_as_bytes()
        blob.delete(if_generation_match=blob.generation)
        with pytest.raises(NotFound):
            google.blob("key").download_as_bytes()

    def test_it_uploads_in_chunks(self, google: Any) -> None:
        """A resumable upload in many chunks, conditional."""
        blob = google.blob("large", chunk_size=_MIB)
        body = bytes(range(256)) * (5 * _MIB // 256) + b"end"
        with blob.open("wb", if_generation_match=0) as stream:
            stream.write(body)
        assert google.blob("large").download_as_bytes() == body
        with (
            pytest.raises(InvalidResponse, match="412"),
            google.blob("large").open("wb", if_generation_match=0) as stream,
        ):
            stream.write(body)

    def test_it_lists_in_pages(self, google: Any) -> None:
        """Names and groups, page after page, from an offset."""
        names = ["a", *(f"b/{n}" for n in range(5)), "c", "d/x", "e"]
        for name in names:
            google.blob(name).upload_from_string(b"x")
        assert [blob.name for blob in google.list_blobs(page_size=2)] == names
        listing = google.list_blobs(delimiter="/", page_size=2)
        assert [blob.name for blob in listing] == ["a", "c", "e"]
        assert listing.prefixes == {"b/", "d/"}
        part = google.list_blobs(start_offset="b/3", end_offset="d", prefix="")
        assert [blob.name for blob in part] == ["b/3", "b/4", "c"]

    def test_it_copies_and_rewrites(self, google: Any) -> None:
        """With preconditions on the source and on the target."""
        source = google.blob("source")
        source.upload_from_string(b"body")
        copy = google.copy_blob(
            source, google, "copy", if_source_generation_match=source.generation
        )
        assert copy.download_as_bytes() == b"body"
        with pytest.raises(PreconditionFailed):
            google.copy_blob(source, google, "other", if_source_generation_match=1)
        with pytest.raises(PreconditionFailed):
            google.blob("copy").rewrite(source, if_generation_match=0)
        token, done, size = google.blob("new").rewrite(source)
        assert (token, done, size) == (None, 4, 4)

    def test_it_deletes_in_batches(self, google: Any) -> None:
        """Each call of a batch has its own answer."""
        for name in ("a", "b"):
            google.blob(name).upload_from_string(b"x")
        missing: list[str] = []
        google.delete_blobs(["a", "missing", "b"], on_error=lambda blob: missing.append(str(blob)))
        with google.client.batch(raise_exception=False) as batch:
            google.delete_blob("also missing")
        assert [reply.status_code for reply in batch._responses] == [404]
        assert (missing, list(google.list_blobs())) == (["missing"], [])

    def test_the_fake_server_knows_buckets(self, google: Any) -> None:
        """A missing one, one that is there, and one that is not empty."""
        assert google.exists()
        missing = google.client.bucket("not-there")
        assert not missing.exists()
        with pytest.raises(NotFound):
            missing.blob("key").upload_from_string(b"x")
        with pytest.raises(Conflict):
            google.client.create_bucket(google.name)
        google.blob("key").upload_from_string(b"x")
        with pytest.raises(Conflict):
            google.delete()
        google.blob("key").delete()
        google.delete()
        assert not google.exists()

    def test_of_racing_writers_one_wins(self, google: Any) -> None:
        """From threads, each with its own connection."""
        google.blob("key").upload_from_string(b"first")
        generation = google.get_blob("key").generation
        together = threading.Barrier(8)
        won: list[int] = []

        def write(number: int) -> None:
            blob = google.blob("key")
            together.wait(240)
            try:
                blob.upload_from_string(b"%d" % number, if_generation_match=generation)
            except PreconditionFailed:
                return
            won.append(number)

        threads = [threading.Thread(target=write, args=(n,)) for n in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert len(won) == 1
        assert google.blob("key").download_as_bytes() == b"%d" % won[0]


class TestGcsfs:
    """gcsfs.

    Its multipart uploads have lines that end in LF, against the standard: the test server refuses
    them, as Google's own testbench does.
    """

    async def test_it_writes_reads_lists_and_deletes(self, gcsfs: Any, bucket: str) -> None:
        """Files as it sees them."""
        body = b"0123456789" * 150_000
        location = await _upload(gcsfs, bucket, "folder/large", body)
        assert "upload_id" in location
        assert await gcsfs._cat_file(f"{bucket}/folder/large") == body
        assert await gcsfs._cat_file(f"{bucket}/folder/large", start=-5) == b"56789"
        assert await gcsfs._cat_file(f"{bucket}/folder/large", start=3, end=5) == b"34"
        assert await gcsfs._ls(bucket, detail=False) == [f"{bucket}/folder"]
        assert await gcsfs._find(bucket) == [f"{bucket}/folder/large"]
        await gcsfs._cp_file(f"{bucket}/folder/large", f"{bucket}/copy")
        info = await gcsfs._info(f"{bucket}/copy")
        assert (info["size"], int(info["generation"]) > 0) == (len(body), True)
        await gcsfs._rm_file(f"{bucket}/copy")
        assert not await gcsfs._exists(f"{bucket}/copy")

    async def test_it_passes_preconditions_on(self, gcsfs: Any, bucket: str) -> None:
        """Through its general call; its own retries are not for such writes."""
        await gcsfs._call(
            "POST",
            f"{gcsfs._location}/upload/storage/v1/b/{bucket}/o",
            uploadType="media",
            name="key",
            ifGenerationMatch=0,
            data=b"body",
            json_out=True,
        )
        assert await gcsfs._cat_file(f"{bucket}/key") == b"body"
        with pytest.raises(FileExistsError):
            await gcsfs._call(
                "POST",
                f"{gcsfs._location}/upload/storage/v1/b/{bucket}/o",
                uploadType="media",
                name="key",
                ifGenerationMatch=0,
                data=b"body",
            )

    async def test_its_batches_are_answered(self, gcsfs: Any, bucket: str) -> None:
        """It sends these to Google's hosts only, unless it is made to."""
        for name in ("a", "b"):
            await _upload(gcsfs, bucket, name, b"0123456789" * 100_000)
        answers = await gcsfs._rm_files([f"{bucket}/a", f"{bucket}/missing", f"{bucket}/b"])
        assert [type(answer) for answer in answers] == [str, OSError, str]
        assert await gcsfs._find(bucket) == []


async def _upload(gcsfs: Any, bucket: str, name: str, body: bytes) -> str:
    from gcsfs.core import initiate_upload, upload_chunk

    location: str = await initiate_upload(gcsfs, bucket, name, mode="create")
    half = _MIB * 3 // 4
    await upload_chunk(gcsfs, location, body[:half], 0, len(body), "text/plain")
    await upload_chunk(gcsfs, location, body[half:], half, len(body), "text/plain")
    return location


class TestStrictness:
    """Unknown parameters are refused."""

    def test_unknown_parameters_are_refused(self) -> None:
        """A condition that is misspelt must not become no condition."""
        ask = Ask.parse("GET", "/storage/v1/b/b/o?ifGenerationMach=0&prefix=a")
        with pytest.raises(Refusal, match="ifGenerationMach"):
            ask.allow("prefix", "ifGenerationMatch")

    def test_an_invalid_generation_is_refused(self) -> None:
        """An invalid generation is a mistake, not a mismatch."""
        for value in ("", "x", "-1", "1.0", str(1 << 63)):
            ask = Ask("GET", [], {"ifGenerationMatch": value})
            with pytest.raises(Refusal):
                ask.conditions()

    def test_fields_select_parts_of_documents(self) -> None:
        """Lists, nested selections and slashes."""
        document = {"items": [{"name": "a", "size": "1"}], "prefixes": ["p"], "x": {"y": 1, "z": 2}}
        assert select(document, "items(name),x/y") == {"items": [{"name": "a"}], "x": {"y": 1}}
        assert select(document, "items/size,prefixes") == {
            "items": [{"size": "1"}],
            "prefixes": ["p"],
        }
        with pytest.raises(Refusal):
            select(document, "items(name")

    def test_a_generation_is_never_used_twice(self) -> None:
        """An object may be deleted and written again within a microsecond."""
        state = State()
        state.create_bucket("b")
        seen: set[int] = set()
        for _ in range(1000):
            item = state.write("b", "key", b"", {}, Conditions(generation_match=0))
            seen.add(item.generation)
            state.delete("b", "key", None, Conditions())
        assert len(seen) == 1000


async def test_a_restart_loses_nothing_that_was_answered(tmp_path: Any) -> None:
    """The server is killed, not asked to end."""
    from tests.servers.gcs.running import serving

    def run() -> None:
        with serving(tmp_path, durable=True) as server:
            server.make_bucket("bucket")
            for number in range(20):
                server.call(
                    "POST",
                    f"/upload/storage/v1/b/bucket/o?uploadType=media&name=key-{number}",
                    {"number": number},
                )
            server.restart()
            assert len(server.call("GET", "/storage/v1/b/bucket/o")["items"]) == 20
            assert server.call("GET", "/storage/v1/b/bucket/o/key-7?alt=media") == {"number": 7}

    await asyncio.to_thread(run)
