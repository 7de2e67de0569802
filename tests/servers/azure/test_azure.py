"""Azure in particular: lost replies, large objects, bad input, credentials, secrets."""

from __future__ import annotations

import asyncio
import gc
import logging
import pickle
import traceback
from datetime import UTC, datetime, timedelta
from functools import partial
from typing import TYPE_CHECKING, Any, Final

import pytest
from azure.core.credentials import AccessToken
from azure.storage.blob import ContainerSasPermissions, generate_container_sas

from icechunk_async.errors import (
    BucketNotFoundError,
    ExpiredCredentialsError,
    IcechunkError,
    InvalidObjectKeyError,
    NameResolutionError,
    OutcomeUnknownError,
    PermissionDeniedError,
    PreconditionFailedError,
    StorageClosedError,
    ThrottledError,
    TLSError,
    UnreachableError,
)
from icechunk_async.storage import ABSENT, open_storage
from icechunk_async.testing.cancellation import at_every_wait
from icechunk_async.testing.conformance.keys import AWKWARD_KEYS
from icechunk_async.testing.proxy import FaultProxy
from icechunk_async.testing.proxy_plan import (
    AZURE_BUSY,
    Fault,
    FaultPlan,
    Hang,
    Reset,
    Respond,
    Rule,
    SlowBody,
    Truncate,
)
from icechunk_async_azure import writing
from tests.servers.azure.azurite_server import ACCOUNT, KEY
from tests.servers.azure.conftest import options, service
from tests.servers.process import free_port

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable
    from contextlib import AbstractAsyncContextManager

    from icechunk_async.storage import Storage
    from tests.servers.azure.azurite_server import Azurite

_KEYS: Final = tuple(key for key in AWKWARD_KEYS if "\\" not in key)


@pytest.fixture
async def storage(azurite: Azurite, container: str) -> AsyncIterator[Storage]:
    """Open a prefix in a container."""
    async with open_storage(f"az://{container}/some/prefix", **options(azurite.endpoint)) as it:
        yield it


@pytest.fixture
async def proxy(azurite: Azurite) -> AsyncIterator[FaultProxy]:
    """Run a proxy in front of the server."""
    async with FaultProxy("127.0.0.1", azurite.port) as proxy:
        yield proxy


def through(proxy: FaultProxy, container: str, **more: Any) -> AbstractAsyncContextManager[Storage]:
    """Open the container through the proxy."""
    return open_storage(f"az://{container}", **options(f"{proxy.url}/{ACCOUNT}"), **more)


def signature(container: str, lasts: timedelta, permission: str = "rwdlac") -> str:
    """Return a SAS token for a container."""
    return generate_container_sas(
        ACCOUNT,
        container,
        account_key=KEY,
        permission=ContainerSasPermissions.from_string(permission),
        start=datetime.now(UTC) - timedelta(days=1),
        expiry=datetime.now(UTC) + lasts,
    )


async def names(storage: Storage, **how: Any) -> list[str]:
    """Return the keys of a listing."""
    return [entry.key async for entry in storage.list_prefix(**how)]  # type: ignore[union-attr]


async def all_arrived(proxy: FaultProxy, count: int) -> bool:
    """Return whether this number of requests reached the proxy."""
    return len(proxy.log) >= count


async def eventually(holds: Callable[[], Awaitable[object]]) -> None:
    """Ask again and again until it holds; nobody tells when it does."""
    async with asyncio.timeout(240):
        while not await holds():  # noqa: ASYNC110
            await asyncio.sleep(0.01)


class TestKeys:
    """The promises that the suite's backslash keeps from being tried."""

    async def test_awkward_keys_are_literal_in_order_and_places_to_go_on(
        self, storage: Storage
    ) -> None:
        """Among them some that UTF-16 and UTF-8 order differently."""
        for key in _KEYS:
            await storage.put(key, key.encode())
        for key in _KEYS:
            assert (await storage.get(key)).data == key.encode()
        expected = sorted(_KEYS, key=lambda key: key.encode())
        assert await names(storage) == expected
        for index, key in enumerate(expected):
            assert await names(storage, start_after=key) == expected[index + 1 :]

    async def test_a_backslash_is_refused(self, storage: Storage) -> None:
        """Azure would take it for a slash, and another key's object for this one."""
        with pytest.raises(InvalidObjectKeyError, match="backslash"):
            await storage.put("a\\b", b"")

    async def test_a_name_that_is_too_long_with_its_prefix_is_refused(
        self, storage: Storage
    ) -> None:
        """The key alone would do."""
        with pytest.raises(InvalidObjectKeyError, match="prefix"):
            await storage.put(("d" * 254 + "/") * 4 + "kkkk", b"")

    async def test_a_prefix_hides_what_lies_beside_it(
        self, azurite: Azurite, container: str, storage: Storage
    ) -> None:
        """This includes similar names, and names that are not valid keys."""
        async with service(azurite.endpoint) as client:
            for name in ("some/prefix-other", "some/prefix", "other", "some/prefix//a"):
                await client.get_blob_client(container, name).upload_blob(b"x")
        await storage.put("mine", b"x")
        assert await names(storage) == ["mine"]


class TestDoubt:
    """Conditional writes whose answer is lost, or is not to be believed."""

    @pytest.mark.parametrize("fault", [Reset(applied=True), Truncate(), Respond(500)], ids=str)
    @pytest.mark.parametrize("large", [False, True])
    async def test_a_write_is_never_refused_because_it_landed(
        self,
        proxy: FaultProxy,
        container: str,
        monkeypatch: pytest.MonkeyPatch,
        fault: Fault,
        *,
        large: bool,
    ) -> None:
        """Landed is answered where the reply is lost; what was not applied stays in doubt."""
        if large:
            monkeypatch.setattr(writing, "BLOCK_BYTES", 1000)
        body = b"x" * 2500
        async with through(proxy, container) as storage:
            # Conditions are sent with the last request of a write only.
            rule = Rule(fault, method="PUT", path=r"^(?!.*comp=block&).*", first=1)
            proxy.use(FaultPlan((rule,)))
            if isinstance(fault, Respond):
                with pytest.raises(OutcomeUnknownError):
                    await storage.put("key", body, if_version=ABSENT)
                return
            version = await storage.put("key", body, if_version=ABSENT)
            proxy.use(FaultPlan((rule,)))
            version = await storage.put("key", body * 2, if_version=version)
            found = await storage.get("key")
            assert (found.data, found.version) == (body * 2, version)
            # The write was sent once: a second one would be refused, or worse.
            sent = [entry for entry in proxy.log if entry.method == "PUT"]
            assert len(sent) == (2 if not large else 3 + 1 + 5 + 1)

    async def test_a_write_that_was_replaced_meanwhile_is_in_doubt(
        self, azurite: Azurite, proxy: FaultProxy, container: str
    ) -> None:
        """It may have been there for a moment, so it is not refused."""
        for seconds in (2, 30):  # on a busy machine the first may pass before it is replaced
            key = f"key {seconds}"
            async with (
                through(proxy, container, timeout_seconds=seconds) as storage,
                open_storage(f"az://{container}", **options(azurite.endpoint)) as other,
            ):
                proxy.use(FaultPlan((Rule(Hang(applied=True), method="PUT", first=1),)))
                writing_it = asyncio.ensure_future(storage.put(key, b"mine", if_version=ABSENT))
                await eventually(partial(names, other, prefix=key))
                await other.put(key, b"theirs")
                (outcome,) = await asyncio.gather(writing_it, return_exceptions=True)
            if isinstance(outcome, OutcomeUnknownError):
                break
        assert isinstance(outcome, OutcomeUnknownError)

    async def test_a_refusal_that_cannot_be_checked_is_in_doubt(
        self, proxy: FaultProxy, container: str
    ) -> None:
        """Something between here and there may have sent the write twice."""
        async with through(proxy, container) as storage:
            await storage.put("key", b"first")
            proxy.use(FaultPlan((Rule(Respond(500), method="HEAD"),)))
            with pytest.raises(OutcomeUnknownError):
                await storage.put("key", b"second", if_version=ABSENT)

    async def test_a_busy_service_is_told_from_a_doubt(
        self, proxy: FaultProxy, container: str
    ) -> None:
        """With the pause that it asks for, once what is there was looked at."""
        busy = Respond(429, b"", (("Retry-After", "7"),))
        async with through(proxy, container) as storage:
            proxy.use(FaultPlan((Rule(busy),)))
            with pytest.raises(ThrottledError) as caught:
                await storage.get("key")
            assert caught.value.context["retry_after_seconds"] == 7
            proxy.use(FaultPlan((Rule(AZURE_BUSY),)))
            with pytest.raises(ThrottledError):
                await storage.put("key", b"")
            with pytest.raises(OutcomeUnknownError):  # nor can be read what is there
                await storage.put("key", b"", if_version=ABSENT)
            proxy.use(FaultPlan((Rule(AZURE_BUSY, method="PUT"),)))
            with pytest.raises(ThrottledError):
                await storage.put("key", b"", if_version=ABSENT)


class TestLargeObjects:
    """Objects that are written in blocks."""

    @pytest.fixture(autouse=True)
    def _small_blocks(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(writing, "BLOCK_BYTES", 1000)

    async def test_conditions_hold_for_blocks(self, storage: Storage) -> None:
        """They are looked at when the blocks become the object."""
        old = await storage.put("key", b"a" * 2500, if_version=ABSENT)
        new = await storage.put("key", b"b" * 3000, if_version=old)
        with pytest.raises(PreconditionFailedError):
            await storage.put("key", b"c" * 3000, if_version=old)
        with pytest.raises(PreconditionFailedError):
            await storage.put("key", b"c" * 3000, if_version=ABSENT)
        found = await storage.get("key")
        assert (found.data, found.version) == (b"b" * 3000, new)

    async def test_racing_writers_of_blocks_leave_one_whole_object(self, storage: Storage) -> None:
        """A commit discards the blocks of the other writers, which send them again."""
        bodies = [bytes([n]) * 2500 for n in range(4)]
        await asyncio.gather(*(storage.put("key", body) for body in bodies))
        assert (await storage.get("key")).data in bodies

    async def test_of_racing_creators_of_blocks_one_wins(self, storage: Storage) -> None:
        """The others are refused, not failed."""
        bodies = [bytes([n]) * 2500 for n in range(6)]
        done = await asyncio.gather(
            *(storage.put("key", body, if_version=ABSENT) for body in bodies),
            return_exceptions=True,
        )
        lost = [one for one in done if isinstance(one, BaseException)]
        assert [type(one) for one in lost] == [PreconditionFailedError] * 5
        assert (await storage.get("key")).data in bodies

    @pytest.mark.parametrize("size", [0, 10, 2500])
    async def test_copies_can_go_through_this_machine(
        self, proxy: FaultProxy, container: str, size: int
    ) -> None:
        """Where the service cannot make them: of one version, or refused."""
        refusal = Respond(409, b"", (("x-ms-error-code", "CannotVerifyCopySource"),))
        async with through(proxy, container) as storage:
            version = await storage.put("source", b"x" * size)
            proxy.use(FaultPlan((Rule(refusal, method="PUT", path=r".*/target$", first=1),)))
            copied = await storage.copy("source", "target", if_version=version)
            found = await storage.get("target")
            assert (found.data, found.version) == (b"x" * size, copied)
            newer = await storage.put("source", b"y" * size)
            proxy.use(FaultPlan((Rule(refusal, method="PUT", path=r".*/target$"),)))
            with pytest.raises(PreconditionFailedError) as caught:
                await storage.copy("source", "target", if_version=version)
            assert caught.value.context["key"] == "source"
            assert newer != version


class TestCredentials:
    """Credentials that work, and the errors of those that do not."""

    async def test_a_sas_token_reads_writes_lists_copies_and_deletes(
        self, azurite: Azurite, container: str
    ) -> None:
        """Everything works without the account's key."""
        token = signature(container, timedelta(hours=1))
        async with _with_sas(azurite, container, token) as storage:
            version = await storage.put("key", b"body", if_version=ABSENT)
            await storage.copy("key", "copy", if_version=version)
            assert await names(storage) == ["copy", "key"]
            assert (await storage.get("copy")).data == b"body"
            assert await storage.delete(["key", "copy"]) == []

    async def test_a_sas_token_is_fetched_again_before_it_ends(
        self, azurite: Azurite, container: str
    ) -> None:
        """Each of these ends so soon that it is replaced at once."""
        fetched: list[str] = []

        async def fetch() -> str:
            fetched.append(signature(container, timedelta(seconds=100)))
            return fetched[-1]

        async with _with_sas(azurite, container, fetch) as storage:
            await storage.put("key", b"body")
            await storage.get("key")
        assert len(fetched) >= 2

    async def test_an_expired_sas_token_is_named(self, azurite: Azurite, container: str) -> None:
        """With the time when it ended, by every operation."""
        token = signature(container, timedelta(minutes=-1))
        async with _with_sas(azurite, container, token) as storage:
            for operation in (storage.get("key"), storage.put("key", b""), anext(_list(storage))):
                with pytest.raises(ExpiredCredentialsError, match="expired at"):
                    await operation
            assert isinstance((await storage.delete(["key"]))[0].error, ExpiredCredentialsError)

    async def test_a_sas_token_that_may_only_read_cannot_write(
        self, azurite: Azurite, container: str
    ) -> None:
        """It is not called wrong, but not allowed."""
        token = signature(container, timedelta(hours=1), "rl")
        async with _with_sas(azurite, container, token) as storage:
            with pytest.raises(PermissionDeniedError, match="may not"):
                await storage.put("key", b"")

    async def test_a_wrong_key_is_denied(self, azurite: Azurite, container: str) -> None:
        """With the service's word for it, which in Azurite is not that of Azure."""
        wrong = {**options(azurite.endpoint), "account_key": "AAAA" + KEY[4:]}
        async with open_storage(f"az://{container}", **wrong) as storage:
            with pytest.raises(PermissionDeniedError, match="answered 403"):
                await storage.get("key")

    async def test_anyone_may_read_a_public_container(
        self, azurite: Azurite, container: str
    ) -> None:
        """Writing needs credentials."""
        async with service(azurite.endpoint) as client:
            at = client.get_container_client(container)
            await at.set_container_access_policy({}, public_access="container")
            await at.get_blob_client("key").upload_blob(b"body")
        how = {"endpoint_url": azurite.endpoint, "allow_http": True, "anonymous": True}
        async with open_storage(f"az://{container}", **how) as storage:
            assert (await storage.get("key")).data == b"body"
            with pytest.raises((PermissionDeniedError, BucketNotFoundError)):
                await storage.put("key", b"")

    async def test_a_token_callback_is_asked(self, azurite: Azurite) -> None:
        """Up to the connection: the server here speaks no TLS, and tokens need it."""
        asked: list[str] = []

        async def fetch() -> AccessToken:
            asked.append("asked")
            return AccessToken("a-token", 1 << 40)

        secure = azurite.endpoint.replace("http://", "https://")
        async with open_storage("az://box", endpoint_url=secure, credential=fetch) as storage:
            with pytest.raises(TLSError):
                await storage.get("key")
        assert asked

    async def test_a_connection_string_opens(self, azurite: Azurite, container: str) -> None:
        """It names the account, the key and the address."""
        text = (
            f"DefaultEndpointsProtocol=http;AccountName={ACCOUNT};AccountKey={KEY};"
            f"BlobEndpoint={azurite.endpoint};"
        )
        async with open_storage(
            f"az://{container}", connection_string=text, allow_http=True
        ) as storage:
            await storage.put("key", b"")


class TestTrouble:
    """The error names the mistake."""

    async def test_every_operation_names_a_missing_container(self, azurite: Azurite) -> None:
        """Every operation names it, and the error differs from that of a missing object."""
        async with open_storage("az://missing", **options(azurite.endpoint)) as storage:
            for operation in (
                storage.get("key"),
                storage.put("key", b""),
                storage.put("key", b"", if_version=ABSENT),
                storage.copy("key", "other"),
                anext(_list(storage)),
            ):
                with pytest.raises(BucketNotFoundError, match="missing") as caught:
                    await operation
                assert caught.value.context["bucket"] == "missing"
            assert isinstance((await storage.delete(["key"]))[0].error, BucketNotFoundError)

    async def test_a_server_that_does_not_run_is_unreachable_and_leaves_no_doubt(self) -> None:
        """Nothing was sent, so that nothing is in doubt."""
        where = options(f"http://127.0.0.1:{free_port()}/{ACCOUNT}")
        async with open_storage("az://box", **where) as storage:
            for condition in (None, ABSENT):
                with pytest.raises(UnreachableError, match="no connection to 127"):
                    await storage.put("key", b"", if_version=condition)

    async def test_a_host_without_an_address_is_named(self) -> None:
        """The host is named."""
        where = options("https://nonexistent.invalid")
        async with open_storage("az://box", **where) as storage:
            with pytest.raises(NameResolutionError, match=r"nonexistent\.invalid"):
                await storage.get("key")

    async def test_a_silent_server_raises_an_error_that_names_the_option(
        self, proxy: FaultProxy, container: str
    ) -> None:
        """The option that sets the patience is named."""
        async with through(proxy, container, timeout_seconds=0.2) as storage:
            proxy.use(FaultPlan((Rule(Hang(applied=False)),)))
            with pytest.raises(UnreachableError, match="timeout_seconds"):
                await storage.get("key")

    async def test_closing_ends_what_is_under_way(self, proxy: FaultProxy, container: str) -> None:
        """It does not hang, and says why."""
        proxy.use(FaultPlan((Rule(Hang(applied=False)),)))
        async with through(proxy, container) as storage:
            pending = [
                asyncio.ensure_future(storage.get("key")),
                asyncio.ensure_future(storage.put("key", b"", if_version=ABSENT)),
                asyncio.ensure_future(storage.delete(["key"])),
            ]
            await eventually(lambda: all_arrived(proxy, len(pending)))
        for one in pending:
            with pytest.raises(StorageClosedError):
                await one

    async def test_a_cancelled_read_gives_its_connection_back(
        self, proxy: FaultProxy, container: str
    ) -> None:
        """It does so at once. The garbage collector would be late and emit a warning."""
        async with through(proxy, container) as storage:
            await storage.put("key", b"x" * 1_000_000)
            proxy.use(FaultPlan((Rule(SlowBody(0.05), method="GET"),)))
            async for _ in at_every_wait(lambda _: storage.get("key")):
                gc.collect()
            async for _ in at_every_wait(lambda _: names(storage)):
                gc.collect()


class TestSecrets:
    """Keys and signatures stay where they were given."""

    async def test_no_secret_is_shown_or_logged(
        self, azurite: Azurite, container: str, caplog: pytest.LogCaptureFixture
    ) -> None:
        """Messages, causes, contexts, representations and logs have none."""
        caplog.set_level(logging.DEBUG)
        sas = signature(container, timedelta(hours=1), "rl")
        secret = sas.rpartition("sig=")[2]
        shown: list[str] = []
        silent = options(f"http://127.0.0.1:{free_port()}/{ACCOUNT}")
        for how in (
            {**options(azurite.endpoint), "account_key": "AAAA" + KEY[4:]},
            silent,
            {**silent, "account_key": None, "sas_token": sas},
            {**silent, "account_key": None, "sas_token": sas, "endpoint_url": azurite.endpoint},
            {
                **silent,
                "account_key": None,
                "sas_token": sas,
                "endpoint_url": "https://nonexistent.invalid",
            },
        ):
            given = {name: value for name, value in how.items() if value is not None}
            async with open_storage(f"az://{container}", **given) as storage:
                shown += [repr(storage), repr(storage.description)]
                for operation in (
                    storage.put("key", b"", if_version=ABSENT),
                    storage.copy("missing", "key"),
                    anext(_list(storage)),
                ):
                    try:
                        await operation
                    except (IcechunkError, StopAsyncIteration) as error:
                        shown += ["".join(traceback.format_exception(error)), repr(error)]
                        if isinstance(error, IcechunkError):
                            shown += [repr(error.context), repr(pickle.dumps(error))]
        everything = "\n".join([*shown, caplog.text])
        for hidden in (KEY, KEY[4:], secret, secret.replace("%3D", "=").replace("%2B", "+")):
            assert hidden not in everything
        assert "REDACTED" in everything or "sig=" not in everything


def _with_sas(
    azurite: Azurite, container: str, token: object
) -> AbstractAsyncContextManager[Storage]:
    how = {"endpoint_url": azurite.endpoint, "allow_http": True, "sas_token": token}
    return open_storage(f"az://{container}", **how)


async def _list(storage: Storage) -> AsyncIterator[object]:
    async for entry in storage.list_prefix():
        yield entry
