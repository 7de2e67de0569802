"""Whole repositories whose credentials end while they are used: signatures and tokens."""

from __future__ import annotations

import asyncio
import base64
import ipaddress
import json
import re
from datetime import UTC, datetime, timedelta
from email.utils import format_datetime
from typing import TYPE_CHECKING, Any, Final

import aiohttp.connector
import pytest
from azure.core.credentials import AccessToken
from azure.storage.blob import ContainerSasPermissions, generate_container_sas
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

from icechunk_async import Repository
from icechunk_async._runtime.concurrency import bounded_map
from icechunk_async.errors import (
    ExpiredCredentialsError,
    ObjectNotFoundError,
    PermissionDeniedError,
)
from icechunk_async.storage import ABSENT, Version, open_storage
from icechunk_async.testing.proxy import FaultProxy
from icechunk_async.testing.proxy_plan import FaultPlan, Respond, Rule
from tests.helpers import make_array, read, write
from tests.servers.azure.azurite_server import ACCOUNT, KEY, Azurite, running
from tests.servers.azure.conftest import make_container, options

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
    from pathlib import Path

LIFE: Final = timedelta(seconds=5)
"""Long enough for one request: each that is to be sent comes with another."""
SOON: Final = timedelta(seconds=100)
"""Before this is over, another is asked for."""
LATER: Final = timedelta(hours=1)
ENDED: Final = timedelta(minutes=-1)
LARGE: Final = bytes(range(256)) * 16
"""A chunk that is stored in a separate object."""
DENIED: Final = ("x-ms-error-code", "AuthorizationPermissionMismatch")


def signature(container: str, lasts: timedelta) -> str:
    """Return a SAS token for everything in a container; one that ended is negative."""
    return generate_container_sas(
        ACCOUNT,
        container,
        account_key=KEY,
        permission=ContainerSasPermissions.from_string("rwdlac"),
        start=datetime.now(UTC) - timedelta(days=1),
        expiry=datetime.now(UTC) + lasts,
    )


def token(lasts: timedelta) -> AccessToken:
    """Return a token of the identity service, as the emulator takes it."""
    now = datetime.now(UTC).timestamp()
    end = int(now + lasts.total_seconds())
    claims = {
        "aud": "https://storage.azure.com",
        "iss": "https://sts.windows.net/a-tenant/",
        "iat": int(now) - 86400,
        "nbf": int(now) - 86400,
        "exp": end,
    }
    parts = ({"alg": "none", "typ": "JWT"}, claims)
    encoded = [base64.urlsafe_b64encode(json.dumps(it).encode()).rstrip(b"=") for it in parts]
    return AccessToken(b".".join([*encoded, b"unsigned"]).decode(), end)


class Service:
    """A container on a server, and the ways in: one that lasts, others that end."""

    def __init__(self, endpoint: str, container: str, *, tokens: bool) -> None:
        self.url = f"az://{container}"
        self.lasting = options(endpoint)
        self._container = container
        self._tokens = tokens

    def proof(self, lasts: timedelta) -> Any:
        """Return a token or a signature that ends."""
        return token(lasts) if self._tokens else signature(self._container, lasts)

    def shown_by(self, fetch: Callable[[], Awaitable[Any]]) -> dict[str, Any]:
        """Return options for a client that shows the credentials of a function."""
        name = "credential" if self._tokens else "sas_token"
        return {**_without_key(self.lasting), name: fetch}

    async def prepare(self) -> None:
        """Create a repository with an array."""
        async with Repository.create(
            self.url, storage_options=dict(self.lasting), probe=False
        ) as repository:
            session = await repository.writable_session("main")
            await make_array(session, "a", (3,), (1,))
            await session.commit("array")

    async def state(self) -> tuple[list[str], list[bytes | None]]:
        """Return messages and chunks, as somebody with lasting credentials finds them."""
        async with Repository.open(self.url, storage_options=dict(self.lasting)) as repository:
            messages = [info.message async for info in repository.ancestry(branch="main")]
            session = await repository.readonly_session("main")
            chunks = [await read(session, f"a/c/{number}") for number in range(3)]
            return messages[:-2], chunks

    async def wait_until_refused(self, proof: Any) -> None:
        """Return when the service itself calls a proof expired; nobody tells when."""

        async def fetch() -> Any:
            return proof

        async with open_storage(self.url, **self.shown_by(fetch)) as storage, asyncio.timeout(60):
            while True:
                try:
                    await storage.get("missing")
                except ExpiredCredentialsError:
                    return
                except ObjectNotFoundError:
                    await asyncio.sleep(0.2)


def _without_key(lasting: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in lasting.items() if name != "account_key"}


@pytest.fixture(scope="module")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Make a certificate for this machine, and trust it in this process."""
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "tests")])
    here = x509.IPAddress(ipaddress.ip_address("127.0.0.1"))
    now = datetime.now(UTC)
    made = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - LATER)
        .not_valid_after(now + timedelta(days=1))
        .add_extension(x509.SubjectAlternativeName([here]), critical=False)
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .sign(key, hashes.SHA256())
    )
    folder = tmp_path_factory.mktemp("certificate")
    files = folder / "certificate.pem", folder / "key.pem"
    files[0].write_bytes(made.public_bytes(serialization.Encoding.PEM))
    files[1].write_bytes(
        key.private_bytes(
            serialization.Encoding.PEM,
            serialization.PrivateFormat.PKCS8,
            serialization.NoEncryption(),
        )
    )
    # It was made when aiohttp was imported, so that SSL_CERT_FILE comes too late.
    aiohttp.connector._SSL_CONTEXT_VERIFIED.load_verify_locations(files[0])
    return files


@pytest.fixture(scope="module")
def secure(
    tmp_path_factory: pytest.TempPathFactory, certificate: tuple[Path, Path]
) -> Iterator[Azurite]:
    """Run a server that takes tokens, which are sent over TLS only."""
    with running(tmp_path_factory.mktemp("secure") / "log", certificate=certificate) as server:
        yield server


@pytest.fixture(params=["signatures", "tokens"])
async def service(request: pytest.FixtureRequest) -> Service:
    """Return a repository on a server that takes this kind of proof."""
    tokens = request.param == "tokens"
    server: Azurite = request.getfixturevalue("secure" if tokens else "azurite")
    container = await asyncio.to_thread(_make_container, server.endpoint)
    service = Service(server.endpoint, container, tokens=tokens)
    await service.prepare()
    return service


async def test_a_repository_works_on_when_its_first_credentials_have_ended(
    service: Service,
) -> None:
    """A function answers others, in the middle of a session too."""
    given: list[Any] = []

    async def fetch() -> Any:
        given.append(service.proof(LIFE))
        return given[-1]

    async with Repository.open(service.url, storage_options=service.shown_by(fetch)) as repository:
        session = await repository.writable_session("main")
        await write(session, "a/c/0", LARGE)
        await session.commit("before")
        session = await repository.writable_session("main")
        await write(session, "a/c/1", LARGE)
        await service.wait_until_refused(given[-1])
        await write(session, "a/c/2", LARGE)
        assert await read(session, "a/c/1") == LARGE
        await session.commit("after")
    assert await service.state() == (["after", "before"], [LARGE] * 3)


async def test_every_operation_calls_them_expired(service: Service) -> None:
    """Some refusals have no body with a reason. Then the known expiry decides."""

    async def fetch() -> Any:
        return service.proof(ENDED)

    async with open_storage(service.url, **service.shown_by(fetch)) as storage:
        for operation in (
            storage.get("repo"),
            storage.get_if_changed("repo", Version('"1"')),
            storage.put("key", b""),
            storage.put("key", b"", if_version=ABSENT),
            storage.copy("repo", "key"),
            anext(storage.list_prefix()),
        ):
            with pytest.raises(ExpiredCredentialsError, match="expired at"):
                await operation
        assert isinstance((await storage.delete(["key"]))[0].error, ExpiredCredentialsError)


@pytest.mark.parametrize("moment", ["chunk", "commit"])
async def test_credentials_that_are_not_renewed_leave_nothing_half_written(
    service: Service, moment: str
) -> None:
    """The error says what to do. With good credentials the same session commits once."""
    lasts = SOON

    async def fetch() -> Any:
        return service.proof(lasts)

    async with Repository.open(service.url, storage_options=service.shown_by(fetch)) as repository:
        session = await repository.writable_session("main")
        await write(session, "a/c/0", LARGE)
        if moment == "commit":
            await write(session, "a/c/1", LARGE)
        lasts = ENDED
        doing: Awaitable[object]
        doing = session.commit("in vain") if moment == "commit" else write(session, "a/c/1", LARGE)
        with pytest.raises(ExpiredCredentialsError, match="async function that answers them"):
            await doing
        assert await service.state() == ([], [None] * 3)
        lasts = SOON
        await write(session, "a/c/2", LARGE)
        await session.commit("landed")
    expected = [LARGE, LARGE if moment == "commit" else None, LARGE]
    assert await service.state() == (["landed"], expected)


class TestSignatureThatTheServiceRefuses:
    """Although it should last, by this machine's clock: the service's clock is what counts."""

    @pytest.fixture
    async def service(self, azurite: Azurite) -> Service:
        """Return a repository."""
        container = await asyncio.to_thread(_make_container, azurite.endpoint)
        service = Service(azurite.endpoint, container, tokens=False)
        await service.prepare()
        return service

    @pytest.fixture
    async def proxy(self, azurite: Azurite) -> AsyncIterator[FaultProxy]:
        """Run a proxy in front of the server."""
        async with FaultProxy("127.0.0.1", azurite.port) as proxy:
            yield proxy

    async def test_an_expired_token_is_replaced_by_one_fetched_once(
        self, service: Service, proxy: FaultProxy
    ) -> None:
        """However many requests are refused; each is sent again, conditional writes too."""
        given: list[str] = []

        async def fetch() -> str:
            proof: str = service.proof(timedelta(hours=1 + len(given)))
            given.append(proof)
            await asyncio.sleep(0)
            return proof

        options = _through(proxy, service.shown_by(fetch))
        async with Repository.open(service.url, storage_options=options) as repository:
            session = await repository.writable_session("main")
            assert len(given) == 1
            proxy.use(FaultPlan((Rule(_refusal(timedelta(hours=2)), path=_mark(given[0])),)))
            await bounded_map(lambda it: write(session, f"a/c/{it}", LARGE), range(3), limit=3)
            assert len(given) == 2
            proxy.use(FaultPlan((Rule(_refusal(timedelta(hours=3)), path=_mark(given[1])),)))
            await session.commit("landed")
            assert len(given) == 3
        async with open_storage(service.url, **options) as storage:
            await storage.put("small", b"")
            proxy.use(FaultPlan((Rule(_refusal(timedelta(hours=9)), path=_mark(given[3])),)))
            await storage.put("large", LARGE * 200, if_version=ABSENT)
            assert (await storage.get("large")).data == LARGE * 200
        assert await service.state() == (["landed"], [LARGE] * 3)

    async def test_reading_back_ends(self, service: Service, proxy: FaultProxy) -> None:
        """A function that only has ended ones is asked once more for each operation."""
        asked: list[str] = []

        async def fetch() -> str:
            asked.append("asked")
            proof: str = service.proof(timedelta(hours=1, seconds=len(asked)))
            return proof

        async with open_storage(service.url, **_through(proxy, service.shown_by(fetch))) as storage:
            proxy.use(FaultPlan((Rule(_refusal(timedelta(hours=2))),)))
            with pytest.raises(ExpiredCredentialsError):
                await storage.put("key", b"body", if_version=ABSENT)
            assert len(asked) == 2
            proxy.use(FaultPlan((Rule(Respond(403, b"", (DENIED,))),)))
            with pytest.raises(PermissionDeniedError):
                await storage.put("key", b"body", if_version=ABSENT)
            assert len(asked) == 2

    async def test_a_fixed_token_that_expires_is_named_with_its_end(
        self, service: Service, proxy: FaultProxy
    ) -> None:
        """In mid-commit: nothing is half-written, and the message says what to do."""
        fixed = {**_without_key(service.lasting), "sas_token": service.proof(LATER)}
        options = _through(proxy, fixed)
        async with Repository.open(service.url, storage_options=options) as repository:
            session = await repository.writable_session("main")
            await write(session, "a/c/0", LARGE)
            proxy.use(FaultPlan((Rule(_refusal(2 * LATER), method="PUT", path="/(repo|refs)"),)))
            with pytest.raises(ExpiredCredentialsError, match=r"expired at .* Give fresh ones"):
                await session.commit("in vain")
            assert await service.state() == ([], [None] * 3)

    async def test_a_token_that_ended_within_the_second_of_the_refusal_has_expired(
        self, service: Service, proxy: FaultProxy
    ) -> None:
        """The service tells whole seconds."""
        fixed = {**_without_key(service.lasting), "sas_token": service.proof(LATER)}
        async with open_storage(service.url, **_through(proxy, fixed)) as storage:
            proxy.use(FaultPlan((Rule(_refusal(LATER - timedelta(seconds=1))),)))
            with pytest.raises(ExpiredCredentialsError, match="expired at"):
                await storage.get("repo")


def _make_container(endpoint: str) -> str:
    return asyncio.run(make_container(endpoint))


def _through(proxy: FaultProxy, options: dict[str, Any]) -> dict[str, Any]:
    return {**options, "endpoint_url": f"{proxy.url}/{ACCOUNT}"}


def _mark(token: str) -> str:
    """Return a pattern that finds a signature in a request."""
    return re.escape(token.partition("sig=")[2].partition("&")[0])


def _refusal(ahead: timedelta) -> Respond:
    """Return how a service refuses a signature that has ended by its clock."""
    time = format_datetime(datetime.now(UTC) + ahead, usegmt=True)
    return Respond(403, b"", (("x-ms-error-code", "AuthenticationFailed"), ("Date", time)))
