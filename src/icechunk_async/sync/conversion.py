"""Arguments of the facade in the words of the library."""

from __future__ import annotations

import warnings
from os import PathLike
from typing import TYPE_CHECKING, Any, Final

from icechunk_async.errors import InvalidInputError
from icechunk_async.sync._mirrors import to_native
from icechunk_async.sync._states import Attribution, SpecVersion
from icechunk_async.sync.errors import translated
from icechunk_async.sync.storage._storage import Storage

if TYPE_CHECKING:
    from collections.abc import Mapping
    from datetime import datetime

    from icechunk_async.engine.open import Location
    from icechunk_async.sync.config import RepositoryConfig

__all__ = [
    "check_aware",
    "check_one",
    "described",
    "given_access",
    "given_config",
    "given_version",
    "shown_attribution",
    "shown_place",
    "shown_version",
    "warn_of_none",
]


def shown_place(storage: Storage | Location) -> Storage:
    """Return the facade's description of a place, however it was given."""
    if isinstance(storage, Storage):
        return storage
    if isinstance(storage, str | PathLike):
        return Storage.from_url(storage)
    return Storage.from_storage(storage)


def described(storage: Storage) -> Storage:
    """Return the description as plain data: of a storage that is open, how to open it again."""
    opened = storage._location  # noqa: SLF001 # pyright: ignore[reportPrivateUsage]
    description = getattr(opened, "description", None)
    if description is None:
        return storage
    return Storage.from_url(description.url, **description.options)


def given_config(config: RepositoryConfig | None) -> Any:
    """Return a configuration of the library."""
    return None if config is None else to_native(config)


def given_access(access: Mapping[str, Any] | None) -> Mapping[str, Any] | None:
    """Return what may be read, in the library's words."""
    if access is None:
        return None
    return {prefix: to_native(credential) for prefix, credential in access.items()}


def given_version(version: SpecVersion | int | None) -> int:
    """Return the number of a format version; the newest for None."""
    return int(SpecVersion.current() if version is None else version)


def shown_version(version: int) -> SpecVersion | None:
    """Return the format version of a number; None for none."""
    return SpecVersion(version) if version else None


def shown_attribution(attribution: Attribution | None) -> Attribution:
    """Return who asks; nobody in particular if nothing was given."""
    return attribution or Attribution()


def check_aware(moment: datetime, name: str) -> None:
    """Make sure that a moment knows its time zone.

    Raises:
        TypeError: it does not.
    """
    if moment.tzinfo is None:
        raise TypeError(
            f"{name} must be a datetime that knows its time zone, as datetime.now(UTC) does."
        )


def check_one(*names: str | None) -> None:
    """Make sure that one of a branch, a tag and a snapshot id is given.

    Raises:
        InvalidInputError: none is, or several are.
    """
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


def warn_of_none(access: Mapping[str, Any] | None, *, stacklevel: int = 4) -> None:
    """Warn of containers whose credentials are not named; the official package does, too."""
    for prefix, credential in (access or {}).items():
        if credential is None:
            scheme = prefix.partition("://")[0]
            explicit = [text for schemes, text in _EXPLICIT.items() if scheme in schemes]
            warnings.warn(
                f"authorize_virtual_chunk_access names no credentials for {prefix!r}, and None "
                f"takes what the environment has. Name them: {(explicit or ['...'])[0]}.",
                DeprecationWarning,
                stacklevel=stacklevel,
            )
