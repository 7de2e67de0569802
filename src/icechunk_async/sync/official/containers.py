"""The places of virtual chunks: kinds of object stores, containers, and references."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final, Self, override

from icechunk_async._runtime.dataclasses import dataclass
from icechunk_async.format import config as native
from icechunk_async.format.config.secrets import VEIL, veiled_options
from icechunk_async.sync.official.display import Displayed, expression, literal, public, title_of
from icechunk_async.sync.official.mirrors import from_native, mirrors, to_native
from icechunk_async.sync.official.variants import Items, Kinds, kinds

if TYPE_CHECKING:
    from collections.abc import Mapping
    from datetime import datetime

    from icechunk_async.sync.official.sections import S3Options

__all__ = ["AnyObjectStoreConfig", "ObjectStoreConfig", "VirtualChunkContainer", "VirtualChunkSpec"]


def _veiled(options: Mapping[str, str] | None) -> str:
    """Return options or headers without those that may be secrets."""
    return "None" if options is None else literal(veiled_options(options))


class _Store(Displayed, Items):
    """A kind of store."""

    @override
    def __repr__(self) -> str:
        return f"{title_of(type(self))}({', '.join(value for _, value in self._rows())})"

    @override
    def _rows(self) -> list[tuple[str, str]]:
        return []


class _S3(_Store):
    """A store that speaks S3."""

    @override
    def __repr__(self) -> str:
        return f"{title_of(type(self))}({self[0]!r})"

    @override
    def _rows(self) -> Any:
        return self[0]._rows()  # noqa: SLF001 - shown as its options are


class _WithOptions(_Store):
    """A store described by options of its client."""

    @override
    def _rows(self) -> list[tuple[str, str]]:
        return [("config", _veiled(self[0]))]

    @override
    def to_native(self) -> Any:
        assert self.native_class is not None
        return self.native_class(*(value or {} for value in self.values()))

    @classmethod
    @override
    def from_native(cls, value: Any) -> Self:
        store = value.options
        return cls(dict(store) or None)  # type: ignore[call-arg]


@kinds("config")
class ObjectStoreConfig(Kinds, Displayed):
    """The kind of store of a virtual chunk container, and the way to reach it."""

    class InMemory(_Store, of=native.InMemoryStore):
        pass

    class LocalFileSystem(_Store, of=native.LocalFileSystemStore):
        _0: str

        @override
        def _rows(self) -> list[tuple[str, str]]:
            return [("path", literal(self._0))]

    class S3Compatible(_S3, of=native.S3CompatibleStore):
        _0: S3Options

    class S3(_S3, of=native.S3Store):
        _0: S3Options

    class Gcs(_WithOptions, of=native.GcsStore):
        _0: Mapping[str, str] | None = None

    class Azure(_WithOptions, of=native.AzureStore):
        _0: Mapping[str, str] | None = None

    class Tigris(_S3, of=native.TigrisStore):
        _0: S3Options

    class Http(_WithOptions, of=native.HttpStore):
        _0: Mapping[str, str] | None = None
        _1: Mapping[str, str] | None = None

        @override
        def _rows(self) -> list[tuple[str, str]]:
            headers = None if self._1 is None else dict.fromkeys(self._1, VEIL)
            return [("opts", _veiled(self._0)), ("headers", literal(headers))]

        @classmethod
        @override
        def from_native(cls, value: Any) -> Self:
            return cls(dict(value.options) or None, dict(value.headers) or None)


AnyObjectStoreConfig = (
    ObjectStoreConfig.InMemory
    | ObjectStoreConfig.LocalFileSystem
    | ObjectStoreConfig.S3
    | ObjectStoreConfig.S3Compatible
    | ObjectStoreConfig.Gcs
    | ObjectStoreConfig.Azure
    | ObjectStoreConfig.Tigris
    | ObjectStoreConfig.Http
)


@mirrors(native.VirtualChunkContainer)
@public("virtual")
@dataclass(repr=False)
class VirtualChunkContainer(Displayed):
    """A place that virtual chunks may refer to.

    Attributes:
        url_prefix: the beginning of the locations in the container; ends in `/`.
        store: the kind of store.
        name: a unique name without `/`, for locations such as `vcc://<name>/...`.
    """

    url_prefix: str
    store: AnyObjectStoreConfig
    name: str | None = None

    @override
    def __repr__(self) -> str:
        return expression(title_of(type(self)), [(n, getattr(self, n)) for n in _CONTAINER])

    @override
    def _rows(self) -> list[tuple[str, object]]:
        return [
            ("name", literal(self.name)),
            ("url_prefix", literal(self.url_prefix)),
            ("store", self.store),
        ]

    def to_native(self) -> native.VirtualChunkContainer:
        """Return the engine's counterpart.

        Raises:
            InvalidConfigError: the prefix does not fit the store, or the name is invalid.
        """
        return native.VirtualChunkContainer(self.url_prefix, to_native(self.store), self.name)

    @classmethod
    def from_native(cls, value: native.VirtualChunkContainer) -> Self:
        """Return the counterpart of a container of the engine."""
        return cls(value.url_prefix, from_native(value.store), value.name)


_CONTAINER: Final = ("name", "url_prefix", "store")


@public("virtual")
@dataclass(frozen=True)
class VirtualChunkSpec:
    """One virtual chunk: its place in the array, and the place of its bytes.

    Attributes:
        index: the chunk's coordinates in the grid of chunks.
        location: URL of the object, or `vcc://container/path`; `?`, `#` and `%` in the object's
            key are percent-encoded.
        offset: the first byte of the chunk in the object.
        length: bytes of the chunk.
        etag_checksum: reading fails if the object has another ETag.
        last_updated_at_checksum: reading fails if the object was modified after this aware time.

    Raises:
        TypeError: the time has no zone.
    """

    index: list[int]
    location: str
    offset: int
    length: int
    etag_checksum: str | None = None
    last_updated_at_checksum: datetime | None = None

    def __post_init__(self) -> None:
        limit = self.last_updated_at_checksum
        if limit is not None and limit.tzinfo is None:
            raise TypeError(
                "VirtualChunkSpec(last_updated_at_checksum=...) has no time zone. Use an aware "
                "time, such as datetime.now(UTC)."
            )
