"""The arguments of the facade, converted to those of the library."""

from __future__ import annotations

import warnings
from datetime import datetime
from os import PathLike
from typing import TYPE_CHECKING, Any, Final

from icechunk_async._runtime.blocking.tracebacks import OUR_FILES
from icechunk_async.engine.open import given_options
from icechunk_async.errors import InvalidInputError, WrongTypeError
from icechunk_async.format.config.secrets import veiled_url
from icechunk_async.sync.errors import translated
from icechunk_async.sync.official.mirrors import to_native
from icechunk_async.sync.official.states import SpecVersion
from icechunk_async.sync.storage import Storage

if TYPE_CHECKING:
    from collections.abc import Mapping
    from datetime import timedelta

    from icechunk_async.engine.open import Location

__all__ = [
    "check_aware",
    "check_one",
    "described",
    "given_access",
    "given_storage",
    "given_version",
    "warn_of_none",
]


def given_storage(
    storage: Storage | Location, storage_options: Mapping[str, object] | None = None
) -> Storage:
    """Return the facade's description of a place: a path, a URL or a storage.

    Raises:
        InvalidInputError: there are options, which only a path or a URL can have.
    """
    with translated():
        options = given_options(storage_options)
        if isinstance(storage, str | PathLike):
            return Storage.from_url(storage, **options)
        if options:
            raise InvalidInputError(
                f"storage_options go with a path or a URL; this {type(storage).__name__} has its "
                "own. Give them where it is made, such as Storage.from_url(url, **options)."
            )
    return storage if isinstance(storage, Storage) else Storage.from_storage(storage)


def described(storage: Storage) -> Storage:
    """Return the description as plain data; an open storage is replaced by the way to open it."""
    description = getattr(storage.location, "description", None)
    if description is None:
        return storage
    return Storage.from_url(description.url, **description.options)


def given_access(access: Mapping[str, Any] | None) -> Mapping[str, Any] | None:
    """Return the library's credentials by URL prefix."""
    if access is None:
        return None
    return {prefix: to_native(credential) for prefix, credential in access.items()}


def given_version(version: SpecVersion | int | None) -> int:
    """Return the number of a format version; the newest for None."""
    return int(SpecVersion.current() if version is None else version)


def check_aware(moment: datetime | timedelta | str, name: str) -> None:
    """Raise `WrongTypeError` for a `datetime` without a zone; others have one, or are no time.

    The official package raises a `TypeError`; this one is also an `InvalidInputError`.
    """
    if isinstance(moment, datetime) and moment.tzinfo is None:
        with translated():
            raise WrongTypeError(
                f"{name} must be a datetime with a time zone, such as datetime.now(UTC)."
            )


def check_one(*names: str | None) -> None:
    """Raise `InvalidInputError` unless one of a branch, a tag and a snapshot id is given."""
    if sum(name is not None for name in names) != 1:
        with translated():
            raise InvalidInputError("Must provide one of branch, tag, or snapshot_id.")


_EXPLICIT: Final = {
    ("s3", "tigris"): "s3_from_env_credentials(), or s3_anonymous_credentials() for public buckets",
    ("gs", "gcs"): "gcs_from_env_credentials(), or GcsCredentials.Anonymous() for public buckets",
    ("az", "azure", "abfs"): "azure_from_env_credentials(), or azure_anonymous_credentials()",
    ("file",): "credentials.LocalFileSystemAccess",
    ("http", "https"): "credentials.HttpAccess",
}


def warn_of_none(access: Mapping[str, Any] | None) -> None:
    """Warn of containers without named credentials, as the official package does."""
    for prefix, credential in (access or {}).items():
        if credential is None:
            scheme = prefix.partition("://")[0]
            explicit = [text for schemes, text in _EXPLICIT.items() if scheme in schemes]
            warnings.warn(
                f"authorize_virtual_chunk_access names no credentials for {veiled_url(prefix)!r}, "
                f"and None takes what the environment has. Name them: {(explicit or ['...'])[0]}.",
                DeprecationWarning,
                skip_file_prefixes=OUR_FILES,
            )
