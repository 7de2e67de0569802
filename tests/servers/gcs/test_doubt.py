"""Writes with a lost reply: never a false conflict, never a false success."""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING

import pytest
from aiohttp import web

from icechunk_async.errors import (
    OutcomeUnknownError,
    PreconditionFailedError,
    StorageUnavailableError,
    ThrottledError,
)
from icechunk_async.storage import ABSENT, open_storage
from icechunk_async_gcs import writing
from tests.servers.gcs.json_api.state import Conditions
from tests.servers.gcs.running import ANONYMOUS
from tests.servers.gcs.scripted import scripted

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from icechunk_async.storage import Storage
    from tests.servers.gcs.scripted import Scripted

_LARGE = hashlib.shake_128(b"large").digest(9 * 1024 * 1024)


@pytest.fixture
async def script() -> AsyncIterator[Scripted]:
    """Run the server within the test."""
    async with scripted() as script:
        yield script


@pytest.fixture
async def storage(script: Scripted) -> AsyncIterator[Storage]:
    """Open its bucket."""
    async with open_storage(
        "gs://bucket/repo", endpoint_url=script.url, allow_http=True, token=ANONYMOUS
    ) as storage:
        yield storage


@pytest.fixture
def no_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    """Look again at once, as often as usual."""
    monkeypatch.setattr(writing, "_PAUSES_SECONDS", (0.0, 0.0))


async def test_a_creation_whose_reply_is_lost_has_landed(
    script: Scripted, storage: Storage
) -> None:
    """The object is read back, and is recognised by its write id."""
    script.lose_reply("POST")
    version = await storage.put("key", b"body", if_version=ABSENT)
    found = await storage.get("key")
    assert (bytes(found.data), found.version) == (b"body", version)


async def test_an_update_whose_reply_is_lost_has_landed(script: Scripted, storage: Storage) -> None:
    """The same for an update, also where the service answers with a failure afterwards."""
    version = await storage.put("key", b"first")
    script.lose_reply("POST")
    version = await storage.put("key", b"second", if_version=version)
    script.answer("POST", 500, applied=True)
    version = await storage.put("key", b"third", if_version=version)
    script.answer("POST", 503, applied=True)
    version = await storage.put("key", b"fourth")
    found = await storage.get("key")
    assert (bytes(found.data), found.version) == (b"fourth", version)


async def test_a_write_repeated_by_a_proxy_has_landed(script: Scripted, storage: Storage) -> None:
    """The second request is refused by what the first one wrote: that is no conflict."""
    script.answer("POST", 412, applied=True)
    version = await storage.put("key", b"body", if_version=ABSENT)
    assert (await storage.get("key")).version == version


@pytest.mark.parametrize("body", ["", "<html>", "[]", "null", "{}", "[" * 100_000])
async def test_a_success_that_nobody_understands_is_read_back(
    script: Scripted, storage: Storage, body: str
) -> None:
    """A proxy on the way may change the answer: the write landed, or nobody knows."""
    script.answer("POST", 200, applied=True, body=body)
    version = await storage.put("key", b"one", if_version=ABSENT)
    assert (await storage.get("key")).version == version
    script.answer("POST", 200, applied=True, body=body)
    copied = await storage.copy("key", "copy")
    assert (await storage.get("copy")).version == copied
    script.answer("POST", 200, body=body)
    with pytest.raises(OutcomeUnknownError):
        await storage.put("key", b"two", if_version=version)
    script.answer("POST", 200, body=body)
    with pytest.raises(OutcomeUnknownError):
        await storage.copy("key", "other")


async def test_a_request_that_is_lost_is_unknown(script: Scripted, storage: Storage) -> None:
    """It may still be on its way, so that neither success nor conflict would be true."""
    for expected in (None, ABSENT):
        script.lose_request("POST")
        with pytest.raises(OutcomeUnknownError) as caught:
            await storage.put("key", b"body", if_version=expected)
        assert caught.value.context["key"] == "key"


async def test_a_lost_reply_whose_write_was_replaced_is_unknown(
    script: Scripted, storage: Storage
) -> None:
    """It landed or it lost: the object no longer tells."""
    version = await storage.put("key", b"first")
    await storage.put("key", b"another writer's")
    script.lose_reply("POST")
    with pytest.raises(OutcomeUnknownError):
        await storage.put("key", b"mine", if_version=version)


async def test_a_lost_reply_that_cannot_be_read_back_is_unknown(
    script: Scripted, storage: Storage, no_pauses: None
) -> None:
    """The error says so, and no other one hides it."""
    del no_pauses
    script.lose_reply("POST")
    for _ in range(3):
        script.answer("GET", 503)
    with pytest.raises(OutcomeUnknownError, match="could not be read back"):
        await storage.put("key", b"body", if_version=ABSENT)


async def test_reading_back_is_tried_again(
    script: Scripted, storage: Storage, no_pauses: None
) -> None:
    """A service that loses a reply may be away for a moment."""
    del no_pauses
    script.lose_reply("POST")
    script.answer("GET", 503)
    script.answer("GET", 500)
    version = await storage.put("key", b"body", if_version=ABSENT)
    assert (await storage.get("key")).version == version


async def test_a_refusal_sends_the_write_once(script: Scripted, storage: Storage) -> None:
    """One request, and one look that it was not this write that is there."""
    await storage.put("key", b"first")
    script.seen.clear()
    with pytest.raises(PreconditionFailedError):
        await storage.put("key", b"second", if_version=ABSENT)
    assert [line.split()[0] for line in script.seen] == ["POST", "GET"]


async def test_a_throttled_write_did_not_happen(script: Scripted, storage: Storage) -> None:
    """A 429 is an answer: nothing is in doubt, and the pause is told."""
    script.answer("POST", 429, Retry_After="7")
    with pytest.raises(ThrottledError) as caught:
        await storage.put("key", b"body", if_version=ABSENT)
    assert caught.value.context["retry_after_seconds"] == 7
    await storage.put("key", b"body", if_version=ABSENT)


async def test_objects_up_to_the_threshold_are_sent_at_once(
    script: Scripted, storage: Storage
) -> None:
    """One request for any bytes up to the threshold; beyond it two."""
    for size, requests in ((writing.RESUMABLE_BYTES, 1), (writing.RESUMABLE_BYTES + 1, 2)):
        body = b"\r\n--\r\n" * (size // 6) + b"x" * (size % 6)
        script.seen.clear()
        await storage.put("key", body)
        assert len(script.seen) == requests
        assert (await storage.get("key")).data == body


async def test_a_large_object_is_resumed_where_it_broke_off(
    script: Scripted, storage: Storage, no_pauses: None
) -> None:
    """Lost requests, lost replies and failures cost time, not the upload."""
    del no_pauses
    for fault in (script.lose_request, script.lose_reply):
        fault("PUT")
        version = await storage.put("large", _LARGE)
        found = await storage.get("large")
        assert (found.data == _LARGE, found.version) == (True, version)
    script.answer("PUT", 503)
    script.answer("PUT", 500)
    version = await storage.put("large", _LARGE, if_version=version)
    assert (await storage.get("large")).version == version


async def test_a_large_object_is_written_under_its_condition(
    script: Scripted, storage: Storage
) -> None:
    """It is looked at when the upload begins, and again when it ends."""
    version = await storage.put("large", _LARGE, if_version=ABSENT)
    with pytest.raises(PreconditionFailedError):
        await storage.put("large", _LARGE, if_version=ABSENT)
    assert (await storage.get("large")).version == version

    async def replaced_meanwhile(request: web.BaseRequest) -> web.StreamResponse:
        script.state.write("bucket", "repo/large", b"other", {}, Conditions())
        return await script.server.handle(request)

    script.steps.append(("PUT", replaced_meanwhile))
    with pytest.raises(PreconditionFailedError):
        await storage.put("large", _LARGE, if_version=version)
    assert (await storage.get("large")).data == b"other"


async def test_an_upload_that_cannot_begin_did_not_happen(
    script: Scripted, storage: Storage
) -> None:
    """No byte was sent, so that it may simply be tried again."""
    script.lose_request("POST")
    with pytest.raises(StorageUnavailableError):
        await storage.put("large", _LARGE, if_version=ABSENT)
    await storage.put("large", _LARGE, if_version=ABSENT)


async def test_a_copy_whose_reply_is_lost_has_landed(script: Scripted, storage: Storage) -> None:
    """The copy has its own write id."""
    source = await storage.put("source", b"body")
    script.lose_reply("POST")
    version = await storage.copy("source", "target", if_version=source)
    found = await storage.get("target")
    assert (bytes(found.data), found.version) == (b"body", version)
    script.lose_request("POST")
    with pytest.raises(OutcomeUnknownError):
        await storage.copy("source", "target")


async def test_a_large_copy_takes_several_requests(script: Scripted, storage: Storage) -> None:
    """The service says when it is done; each request carries on where the last one ended."""
    source = await storage.put("source", _LARGE)
    script.seen.clear()
    await storage.copy("source", "target", if_version=source)
    assert len(script.seen) == 9
    assert all("ifSourceGenerationMatch" in line for line in script.seen)
    assert (await storage.get("target")).data == _LARGE


async def test_a_truncated_answer_is_no_answer(script: Scripted, storage: Storage) -> None:
    """Half of an object is an error that may pass, not the object."""
    await storage.put("key", b"0123456789")
    script.truncate("GET")
    with pytest.raises(StorageUnavailableError):
        await storage.get("key")
    assert (await storage.get("key")).data == b"0123456789"


@pytest.mark.parametrize(
    ("kind", "body"),
    [
        ("multipart/mixed; boundary=b", "no parts"),
        ("text/html", "<html>"),
        (
            "multipart/mixed; boundary=b",
            f"--b\r\nContent-ID: <response-{'9' * 5000}>\r\n\r\nHTTP/1.1 204 x\r\n\r\n--b--\r\n",
        ),
        (
            "multipart/mixed; boundary=b0",
            "".join(
                f"--b{n}\r\nContent-Type: multipart/mixed; boundary=b{n + 1}\r\n\r\n"
                for n in range(1000)
            ),
        ),
    ],
)
async def test_a_deletion_whose_reply_nobody_understands_is_reported(
    script: Scripted, storage: Storage, kind: str, body: str
) -> None:
    """The parts are missing, or of another number than was asked, or one in the other."""
    script.answer("POST", 200, body=body, Content_Type=kind)
    failures = await storage.delete(["one", "two"])
    assert [failure.key for failure in failures] == ["one", "two"]
    assert {type(failure.error) for failure in failures} == {OutcomeUnknownError}


@pytest.mark.usefixtures("no_pauses")
async def test_an_upload_whose_progress_is_undone_is_given_up(
    script: Scripted, storage: Storage
) -> None:
    """Only more bytes than ever before are progress, and no more than there are."""
    kept = [len(_LARGE) - 100, len(_LARGE) - 200] * 20

    async def step(request: web.BaseRequest) -> web.StreamResponse:
        async for _ in request.content.iter_any():
            pass
        return web.Response(status=308, headers={"Range": f"bytes=0-{kept.pop() - 1}"})

    script.steps += [("PUT", step)] * len(kept)
    with pytest.raises(OutcomeUnknownError):
        await storage.put("key", _LARGE, if_version=ABSENT)
    assert len([line for line in script.seen if line.startswith("PUT")]) < 10


async def test_a_deletion_whose_reply_is_lost_is_reported(
    script: Scripted, storage: Storage
) -> None:
    """Each key of the request is named; deleting again is no failure."""
    keys = [f"key-{n:03}" for n in range(150)]
    for key in keys:
        await storage.put(key, b"x")
    script.lose_reply("POST")
    failures = await storage.delete(keys)
    assert [failure.key for failure in failures] == keys[:100]
    assert await storage.delete(keys) == []
