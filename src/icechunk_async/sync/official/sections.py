"""Sections of the configuration: mutable mirrors of the frozen classes of the format.

The defaults, ranges and descriptions of all fields are declared once, in
`icechunk_async.format.config`; here are only the official types of the fields. This module has the
base of all sections and those about object stores; see `configuration` for the others.
"""

from __future__ import annotations

import operator
from dataclasses import field, fields
from typing import TYPE_CHECKING, Any, ClassVar, Self, cast, dataclass_transform, override

from icechunk_async._runtime.dataclasses import dataclass
from icechunk_async.format import config as native
from icechunk_async.format.config.fields import Effective, Instance, Integer
from icechunk_async.format.config.fields import Section as NativeSection
from icechunk_async.sync.official.display import (
    Choice,
    Displayed,
    expression,
    literal,
    public,
    title_of,
)
from icechunk_async.sync.official.mirrors import from_native, mirror_of, mirrors, to_native

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = [
    "ChecksumAlgorithm",
    "RepoUpdateRetryConfig",
    "S3Options",
    "Section",
    "StorageConcurrencySettings",
    "StorageRetriesSettings",
    "StorageSettings",
    "StorageTimeoutSettings",
]


@dataclass_transform(field_specifiers=(field,))
class Section(Displayed):
    """Fields that are checked when assigned; compares by value, and is changed in place.

    `class Name(Section, of=native.Name)` is a dataclass that mirrors a native section.
    """

    native_class: ClassVar[type[NativeSection]]
    _kinds: ClassVar[Mapping[str, tuple[Integer | Instance, bool]]]
    """For each field the values that it may hold, and whether None is allowed."""
    _display_order: ClassVar[tuple[str, ...]] = ()
    """All fields, if the display has another order than the constructor."""
    _shown_as_is: ClassVar[frozenset[str]] = frozenset()
    """Fields whose default is not shown in place of None."""

    def __init_subclass__(cls, *, of: type[NativeSection], home: str = "config") -> None:
        """Make a dataclass that is found under `home`, and take the fields' kinds and texts."""
        cls.native_class = of
        cls._kinds = {
            spec.name: (spec.metadata["kind"], spec.default is None)
            for spec in fields(of)
            if spec.name in cls.__annotations__
        }
        _, attributes, lines = (of.__doc__ or "").partition("    Attributes:")
        cls.__doc__ = f"{cls.__doc__}\n\n{attributes}{lines}" if cls.__doc__ else of.__doc__
        dataclass(repr=False)(cls)
        mirrors(of)(public(home)(cls))

    @override
    def __setattr__(self, name: str, value: object) -> None:
        """Check the value.

        Raises:
            AttributeError: there is no such field.
            TypeError: the value has another type than the field.
            OverflowError: the number is out of the field's range.
            ValueError: the number is 0, and the field must be positive.
        """
        if name not in self._kinds:
            raise AttributeError(
                f"{type(self).__name__} has no field {name!r}. Fields: {', '.join(self._kinds)}."
            )
        object.__setattr__(self, name, self._checked(name, value))

    def _checked(self, name: str, value: object) -> object:
        kind, optional = self._kinds[name]
        if value is None and optional:
            return None
        where = f"{type(self).__name__}.{name}"
        if isinstance(kind, Integer):
            return _integer(where, value, kind)
        expected = mirror_of(kind.cls)
        if not isinstance(value, expected):
            raise TypeError(
                f"{where} is of type {type(value).__name__}; allowed: {expected.__name__}"
                f"{' or None' * optional}."
            )
        return value

    def to_native(self) -> Any:
        """Return the engine's counterpart.

        Raises:
            InvalidConfigError: a value cannot be stored.
        """
        values = {name: to_native(getattr(self, name)) for name in self._kinds}
        return self.native_class(**values)

    @classmethod
    def from_native(cls, value: object) -> Self:
        """Return the counterpart of a native section."""
        return cls(**{name: from_native(getattr(value, name)) for name in cls._kinds})

    def _names(self) -> tuple[str, ...]:
        return self._display_order or tuple(self._kinds)

    @override
    def __repr__(self) -> str:
        return expression(
            title_of(type(self)), [(name, getattr(self, name)) for name in self._names()]
        )

    @override
    def _rows(self) -> list[tuple[str, object]]:
        return [(name, self._effective(name)) for name in self._names()]

    def _effective(self, name: str) -> object:
        value = getattr(self, name)
        # As officially, the display has the default where nothing is set, and says so.
        if value is None and name not in self._shown_as_is:
            default = _defaults(self.native_class).get(name)
            if default is not None:
                shown = from_native(default)
                return shown if isinstance(shown, Displayed) else f"{literal(shown)} (default)"
        return value if isinstance(value, Displayed) else literal(value)


def _integer(where: str, value: object, kind: Integer) -> int:
    try:
        number = operator.index(cast("Any", value))
    except TypeError:
        raise TypeError(
            f"{where} is of type {type(value).__name__}; allowed: {kind.allowed}, or None."
        ) from None
    if kind.accepts(number):
        return number
    # The official classes raise these: one error for the 0 of a number that is never 0, another for
    # what does not fit its bits.
    problem = f"{where} is {number}; allowed: {kind.allowed}, or None."
    raise ValueError(problem) if number == 0 else OverflowError(problem)


def _defaults(cls: type[NativeSection]) -> Mapping[str, object]:
    """Return the values that None stands for, by field."""
    unset = cls()
    names = [spec.name for spec in fields(cls)]
    return {
        name: getattr(unset, f"effective_{name}")
        for name in names
        if isinstance(getattr(cls, f"effective_{name}", None), Effective | property)
    }


# The use of object stores


@mirrors(native.ChecksumAlgorithm)
@public("storage")
class ChecksumAlgorithm(Choice):
    """Checksums that S3 clients can send."""

    Crc32 = 0
    Crc32c = 1
    Crc64Nvme = 2
    Sha1 = 3
    Sha256 = 4


class S3Options(Section, of=native.S3Options, home="storage"):
    region: str | None = None
    endpoint_url: str | None = None
    allow_http: bool = False
    anonymous: bool = False
    force_path_style: bool = False
    network_stream_timeout_seconds: int | None = None
    requester_pays: bool = False
    checksum_algorithm: ChecksumAlgorithm | None = None


class StorageConcurrencySettings(Section, of=native.StorageConcurrencySettings, home="storage"):
    max_concurrent_requests_for_object: int | None = None
    ideal_concurrent_request_size: int | None = None


class StorageRetriesSettings(Section, of=native.StorageRetriesSettings, home="storage"):
    max_tries: int | None = None
    initial_backoff_ms: int | None = None
    max_backoff_ms: int | None = None


class StorageTimeoutSettings(Section, of=native.StorageTimeoutSettings, home="storage"):
    connect_timeout_ms: int | None = None
    read_timeout_ms: int | None = None
    operation_timeout_ms: int | None = None
    operation_attempt_timeout_ms: int | None = None


class StorageSettings(Section, of=native.StorageSettings, home="storage"):
    _shown_as_is: ClassVar = frozenset({"timeouts"})
    _display_order: ClassVar = (
        "unsafe_use_conditional_create",
        "unsafe_use_conditional_update",
        "unsafe_use_metadata",
        "storage_class",
        "metadata_storage_class",
        "chunks_storage_class",
        "minimum_size_for_multipart_upload",
        "concurrency",
        "retries",
        "timeouts",
    )

    concurrency: StorageConcurrencySettings | None = None
    retries: StorageRetriesSettings | None = None
    unsafe_use_conditional_create: bool | None = None
    unsafe_use_conditional_update: bool | None = None
    unsafe_use_metadata: bool | None = None
    storage_class: str | None = None
    metadata_storage_class: str | None = None
    chunks_storage_class: str | None = None
    minimum_size_for_multipart_upload: int | None = None
    timeouts: StorageTimeoutSettings | None = None


class RepoUpdateRetryConfig(Section, of=native.RepoUpdateRetryConfig):
    default: StorageRetriesSettings | None = None
