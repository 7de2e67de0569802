"""Virtual chunk containers: where chunks that live outside the repository are read from.

A container names a place and the kind of store there. It gives nobody access: readers bring
their credentials when they open the repository.
"""

from __future__ import annotations

from dataclasses import field, fields
from enum import StrEnum
from typing import TYPE_CHECKING, ClassVar, Final, override
from urllib.parse import urlsplit

from icechunk_async._runtime.dataclasses import dataclass
from icechunk_async.errors import InvalidConfigError
from icechunk_async.format.config.fields import BOOL, TEXT, U32, Section, check_text, of_type
from icechunk_async.format.config.secrets import VEIL, veiled_options, veiled_url

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = [
    "AzureStore",
    "ChecksumAlgorithm",
    "GcsStore",
    "HttpStore",
    "InMemoryStore",
    "LocalFileSystemStore",
    "ObjectStoreConfig",
    "S3CompatibleStore",
    "S3Options",
    "S3Store",
    "TigrisStore",
    "VirtualChunkContainer",
]


class ChecksumAlgorithm(StrEnum):
    """Checksums that S3 clients can be told to send."""

    Crc32 = "crc32"
    Crc32c = "crc32c"
    Crc64Nvme = "crc64_nvme"
    Sha1 = "sha1"
    Sha256 = "sha256"


@dataclass(frozen=True, slots=True)
class S3Options(Section):
    """How to reach a store that speaks S3.

    Attributes:
        region: region of the bucket.
        endpoint_url: service other than the provider's own.
        allow_http: whether connections may be unencrypted.
        anonymous: whether requests go unsigned.
        force_path_style: whether the bucket is part of the path instead of the host name.
        network_stream_timeout_seconds: longest pause within a transfer; 0 for no limit.
        requester_pays: whether to agree to pay for requests.
        checksum_algorithm: checksum on writes; None for the client's choice.
    """

    region: str | None = field(default=None, metadata=TEXT)
    endpoint_url: str | None = field(default=None, metadata=TEXT)
    allow_http: bool = field(default=False, metadata=BOOL)
    anonymous: bool = field(default=False, metadata=BOOL)
    force_path_style: bool = field(default=False, metadata=BOOL)
    network_stream_timeout_seconds: int | None = field(default=None, metadata=U32)
    requester_pays: bool = field(default=False, metadata=BOOL)
    checksum_algorithm: ChecksumAlgorithm | None = field(
        default=None, metadata=of_type(ChecksumAlgorithm)
    )

    @override
    def __repr__(self) -> str:
        values = {spec.name: getattr(self, spec.name) for spec in fields(self)}
        if self.endpoint_url is not None:
            # URLs may have a user and a password, and configurations are logged.
            values["endpoint_url"] = veiled_url(self.endpoint_url)
        return f"S3Options({', '.join(f'{name}={value!r}' for name, value in values.items())})"


@dataclass(frozen=True, slots=True)
class InMemoryStore:
    """Memory of one process; cannot serve virtual chunks."""

    # The spec has the kind, but its memory is that of the reader: no location could mean the
    # same to two processes.
    schemes: ClassVar[frozenset[str]] = frozenset()


@dataclass(frozen=True, slots=True)
class LocalFileSystemStore:
    """Files below ``path``."""

    schemes: ClassVar[frozenset[str]] = frozenset({"file"})

    path: str

    def __post_init__(self) -> None:
        """Validate the path."""
        check_text("LocalFileSystemStore.path", self.path)


@dataclass(frozen=True, slots=True)
class S3Store:
    """Amazon's S3."""

    schemes: ClassVar[frozenset[str]] = frozenset({"s3"})

    options: S3Options = S3Options()


@dataclass(frozen=True, slots=True)
class S3CompatibleStore:
    """Another service that speaks S3."""

    schemes: ClassVar[frozenset[str]] = frozenset({"s3"})

    options: S3Options = S3Options()


@dataclass(frozen=True, slots=True)
class TigrisStore:
    """Tigris; the endpoint is its own unless the options name one."""

    schemes: ClassVar[frozenset[str]] = frozenset({"s3", "tigris"})

    options: S3Options = S3Options()


@dataclass(frozen=True, slots=True)
class GcsStore:
    """Google Cloud Storage; the options are the client's, and may hold secrets.

    Wherever stores are shown, values that may be secrets are `****`.
    """

    schemes: ClassVar[frozenset[str]] = frozenset({"gs", "gcs"})

    options: Mapping[str, str] = field(default_factory=dict[str, str], repr=False, hash=False)

    def __post_init__(self) -> None:
        """Keep a copy of the options."""
        object.__setattr__(self, "options", _texts("GcsStore.options", self.options))

    @override
    def __repr__(self) -> str:
        return f"GcsStore({veiled_options(self.options)})"


@dataclass(frozen=True, slots=True)
class AzureStore:
    """Azure Blob Storage; the options name the ``account``, and may hold secrets."""

    schemes: ClassVar[frozenset[str]] = frozenset({"az", "azure", "abfs"})

    options: Mapping[str, str] = field(default_factory=dict[str, str], repr=False, hash=False)

    def __post_init__(self) -> None:
        """Keep a copy of the options."""
        object.__setattr__(self, "options", _texts("AzureStore.options", self.options))

    @override
    def __repr__(self) -> str:
        return f"AzureStore({veiled_options(self.options)})"


@dataclass(frozen=True, slots=True)
class HttpStore:
    """A web server; options of the client and headers of each request may hold secrets."""

    schemes: ClassVar[frozenset[str]] = frozenset({"http", "https"})

    options: Mapping[str, str] = field(default_factory=dict[str, str], repr=False, hash=False)
    headers: Mapping[str, str] = field(default_factory=dict[str, str], repr=False, hash=False)

    def __post_init__(self) -> None:
        """Keep copies of both."""
        # Both are one map in the stored form, with the headers under this key.
        if "headers" in self.options:
            raise InvalidConfigError(
                "HttpStore.options has the key 'headers', which the stored form uses otherwise; "
                "pass headers=.",
                field="HttpStore.options",
            )
        object.__setattr__(self, "options", _texts("HttpStore.options", self.options))
        object.__setattr__(self, "headers", _texts("HttpStore.headers", self.headers))

    @override
    def __repr__(self) -> str:
        headers = dict.fromkeys(self.headers, VEIL)
        return f"HttpStore({veiled_options(self.options)}, headers={headers})"


type ObjectStoreConfig = (
    InMemoryStore
    | LocalFileSystemStore
    | S3Store
    | S3CompatibleStore
    | TigrisStore
    | GcsStore
    | AzureStore
    | HttpStore
)

_STORES: Final = (
    InMemoryStore,
    LocalFileSystemStore,
    S3Store,
    S3CompatibleStore,
    TigrisStore,
    GcsStore,
    AzureStore,
    HttpStore,
)


@dataclass(frozen=True, slots=True)
class VirtualChunkContainer:
    """A place that virtual chunks may refer to.

    Attributes:
        url_prefix: locations that begin so belong to the container; ends in ``/``.
        store: the kind of store there.
        name: lets locations be written ``vcc://<name>/...``; without ``/``, unique.
    """

    url_prefix: str
    store: ObjectStoreConfig
    name: str | None = None

    def __post_init__(self) -> None:
        """Validate store, prefix and name."""
        if not isinstance(self.store, _STORES):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise _bad("store", f"is of type {type(self.store).__name__}", "one of the stores")
        if self.name is not None:
            check_text("VirtualChunkContainer.name", self.name)
            if not self.name or "/" in self.name:
                raise _bad("name", f"is {self.name!r:.64}", "text that is not empty, without '/'")
        check_text("VirtualChunkContainer.url_prefix", self.url_prefix)
        self._check_prefix()

    @override
    def __repr__(self) -> str:
        shown = veiled_url(self.url_prefix)
        return (
            f"VirtualChunkContainer(url_prefix={shown!r}, store={self.store}, name={self.name!r})"
        )

    def _check_prefix(self) -> None:
        prefix = self.url_prefix
        shown = f"is {veiled_url(prefix)!r:.128}"
        # Without the slash s3://data would cover s3://database as well, and access to the one would
        # open the other.
        if not prefix.endswith("/"):
            raise _bad("url_prefix", shown, "a URL that ends in '/'")
        if not prefix.isprintable():
            raise _bad("url_prefix", shown, "a URL of printable characters")
        try:
            url = urlsplit(prefix)
        except ValueError as error:
            raise _bad("url_prefix", f"{shown}, no URL ({error})", "such as s3://bucket/") from None
        schemes = type(self.store).schemes
        if url.scheme not in schemes:
            fitting = ", ".join(sorted(f"{scheme}://" for scheme in schemes)) or "none"
            raise _bad("url_prefix", shown, f"schemes of {type(self.store).__name__}: {fitting}")
        if url.scheme == "file":
            if not url.path.strip("/"):
                raise _bad("url_prefix", shown, "a file URL with a path")
        elif not url.hostname or " " in url.netloc:
            raise _bad("url_prefix", shown, f"a URL with a host, such as {url.scheme}://bucket/")
        if isinstance(self.store, AzureStore) and not self.store.options.get("account"):
            raise _bad("store", "is an AzureStore without account", "options with an 'account'")


def _texts(name: str, values: Mapping[str, str]) -> dict[str, str]:
    for key, value in values.items():
        check_text(f"a key of {name}", key)
        # Keys of FlexBuffers end at a NUL: the rest would be lost, and two keys could become equal.
        if "\0" in key:
            raise InvalidConfigError(f"{name} has a key with NUL; allowed: text.", field=name)
        if not isinstance(value, str):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise InvalidConfigError(
                f"{name}[{key!r:.64}] is of type {type(value).__name__}; allowed: text.",
                field=name,
            )
        check_text(name, value)
    return dict(values)


def _bad(what: str, found: str, allowed: str) -> InvalidConfigError:
    name = f"VirtualChunkContainer.{what}"
    return InvalidConfigError(f"{name} {found}; allowed: {allowed}.", field=name)
