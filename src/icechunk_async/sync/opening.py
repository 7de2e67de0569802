"""How the facade opens repositories: what callers give, checked, converted and kept.

A `Source` is plain data, by which `icechunk_async.handles` opens the repository again in another
process.
"""

from __future__ import annotations

import warnings
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import field, fields, replace
from datetime import datetime
from functools import partial
from os import PathLike
from typing import TYPE_CHECKING, Any, Final, cast

from icechunk_async import handles
from icechunk_async._runtime.blocking.tracebacks import OUR_FILES
from icechunk_async._runtime.dataclasses import dataclass
from icechunk_async._version import __version__
from icechunk_async.engine.open import given_options
from icechunk_async.errors import InvalidInputError, VirtualContainerError, WrongTypeError
from icechunk_async.format.config.secrets import veiled_url
from icechunk_async.repository import Repository as AsyncRepository
from icechunk_async.sync.errors import translated
from icechunk_async.sync.official.mirrors import to_native
from icechunk_async.sync.official.states import Attribution, SpecVersion
from icechunk_async.sync.storage import Storage

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping
    from contextlib import AbstractAsyncContextManager, AbstractContextManager
    from datetime import timedelta

    from icechunk_async.engine.commit.hooks import CommitEvent
    from icechunk_async.engine.files.packing import Packing
    from icechunk_async.engine.open import Creation, Location, Origin
    from icechunk_async.storage.policies.cache import CacheOptions
    from icechunk_async.storage.policies.hedge import HedgePolicy

__all__ = [
    "Held",
    "RepositoryHandle",
    "Source",
    "check_aware",
    "check_one",
    "given_access",
    "given_storage",
    "given_version",
    "warn_of_none",
]

_LABELLED: Final = frozenset({"s3", "gs", "az", "http", "https"})
"""Schemes of storages that have the option ``user_agent``."""
_EXPLICIT: Final = {
    ("s3", "tigris"): "s3_from_env_credentials(), or s3_anonymous_credentials() for public buckets",
    ("gs", "gcs"): "gcs_from_env_credentials(), or GcsCredentials.Anonymous() for public buckets",
    ("az", "azure", "abfs"): "azure_from_env_credentials(), or azure_anonymous_credentials()",
    ("file",): "credentials.LocalFileSystemAccess",
    ("http", "https"): "credentials.HttpAccess",
}


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
        if isinstance(storage, Storage):
            return storage
        if not hasattr(storage, "description"):
            raise WrongTypeError(
                f"A repository is at a path, a URL or a Storage, not a {type(storage).__name__}."
            )
    return Storage.from_storage(storage)


def _described(storage: Storage) -> Storage:
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
    # The official package takes no time without a zone; others here read it as UTC.
    if isinstance(moment, datetime) and moment.tzinfo is None:
        with translated():
            raise WrongTypeError(
                f"{name} must be a datetime with a time zone, such as datetime.now(UTC)."
            )


def check_one(*names: object) -> None:
    """Raise `InvalidInputError` unless one of a branch, a tag and a snapshot id is given."""
    # In the official words, which programs look for.
    if sum(name is not None for name in names) != 1:
        with translated():
            raise InvalidInputError("Must provide one of branch, tag, or snapshot_id.")


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


@dataclass(frozen=True, slots=True)
class Source:
    """The arguments that a repository was opened with, as the caller gave them."""

    storage: Storage
    config: Any = None
    authorized: Mapping[str, Any] | None = None
    attribution: Attribution | None = None
    default_metadata: Mapping[str, Any] = field(default_factory=dict[str, Any])
    cache: CacheOptions | None = None
    hedge: HedgePolicy | None = None
    packing: Packing | None = None
    sums: bool | None = None
    verify_reads: bool = False
    after_commit: tuple[Callable[[CommitEvent], object], ...] = ()
    """Hooks of this process; they do not travel, and so stay the last field."""

    @classmethod
    def given(cls, arguments: Mapping[str, Any]) -> Source:
        """Take the arguments of `Repository.open` or `create` by their names; others are left.

        Warns of containers without named credentials.

        Raises:
            InvalidInputError: there are options, and the storage is not a path or a URL; or
                ``after_commit`` is no list of functions.
        """
        access = arguments["authorize_virtual_chunk_access"]
        warn_of_none(access)
        own = {it.name: arguments[it.name] for it in fields(cls) if it.name in arguments}
        own["storage"] = given_storage(arguments["storage"], arguments["storage_options"])
        own["after_commit"] = ()
        if hooks := arguments["after_commit"]:
            from icechunk_async.engine.commit.hooks import Hooks  # noqa: PLC0415 -- loaded when it is used

            own["after_commit"] = Hooks(hooks).functions
        return cls(**own, authorized=access)

    @classmethod
    def of(cls, origin: Origin) -> Source:
        """Return how the facade opens, in other processes, what was opened natively."""
        return cls(
            Storage.from_url(origin.url, **origin.storage_options),
            origin.config,
            origin.authorized,
            packing=origin.settings.packing,
            sums=origin.settings.sums,
            verify_reads=origin.verify_reads,
        )

    def __reduce__(self) -> tuple[Any, ...]:
        _, *values, _ = (getattr(self, it.name) for it in fields(self))
        return Source, (_described(self.storage), *values)

    def changed(self, config: Any, authorized: Mapping[str, Any] | None) -> Source:
        """Return the arguments for opening it with more configuration, or other access."""
        if config is not None and self.config is not None:
            config = self.config.merge(config)
        return replace(
            self,
            config=self.config if config is None else config,
            authorized=self.authorized if authorized is None else authorized,
            # As with the official package, properties of commits belong to one object.
            default_metadata={},
        )

    def with_metadata(self, metadata: Mapping[str, Any]) -> Source:
        """Return the arguments with other properties of all commits."""
        return replace(self, default_metadata=metadata)

    def settle(self, repository: AsyncRepository) -> None:
        """Give the properties of commits to an open repository."""
        repository.default_commit_metadata = dict(self.default_metadata)

    def errors(self) -> AbstractContextManager[None, None]:
        """Return a block that raises the facade's errors."""
        return translated()

    def opening(self) -> AbstractAsyncContextManager[AsyncRepository]:
        """Open the repository for the length of a block.

        Warns of access to containers that the repository lacks, and opens it without.
        """
        return self._entered(AsyncRepository.open)

    def creating(
        self, creation: Creation, *, or_open: bool = False
    ) -> AbstractAsyncContextManager[AsyncRepository]:
        """Create the repository, or with `or_open` create or open it; warns as `opening` does."""
        create = AsyncRepository.open_or_create if or_open else AsyncRepository.create
        return self._entered(
            partial(
                create,
                spec_version=creation.spec_version,
                layout=creation.layout,
                check_clean_root=creation.check_clean_root,
                probe=creation.probe,
            )
        )

    @asynccontextmanager
    async def _entered(
        self, enter: Callable[..., AbstractAsyncContextManager[AsyncRepository]]
    ) -> AsyncGenerator[AsyncRepository]:
        location, options = await self.storage.place()
        entering = enter(
            location,
            storage_options=_labelled(location, options, self.attribution),
            config=to_native(self.config),
            authorize_virtual_chunk_access=given_access(self.authorized),
            cache=self.cache,
            hedge=self.hedge,
            packing=self.packing,
            sums=self.sums,
            verify_reads=self.verify_reads,
            after_commit=self._hooks(),
        )
        async with AsyncExitStack() as stack:
            try:
                repository = await stack.enter_async_context(entering)
            # The official package only warns of access to containers that a repository lacks.
            except VirtualContainerError as error:  # the repository exists, by now
                again = self.without(error).opening()
                repository = await stack.enter_async_context(again)
            yield repository

    def _hooks(self) -> list[Callable[[CommitEvent], Awaitable[object]]]:
        """Return hooks for the native library, which runs each in a thread."""
        if not self.after_commit:
            return []
        from icechunk_async._runtime.blocking.functions import unblocked  # noqa: PLC0415 -- for hooks

        # The native library refuses what is no function.
        given: tuple[Any, ...] = tuple(self.after_commit)
        return [unblocked(it) if callable(it) else it for it in given]

    def without(self, error: VirtualContainerError) -> Source:
        """Return the source without access to the containers that the error reports as missing."""
        shown = cast("tuple[str, ...]", error.context.get("url_prefixes", ()))
        given = self.authorized or {}
        missing = {it for it in given if veiled_url(it) in shown}
        if not missing:
            raise error
        for prefix in shown:
            warnings.warn(
                f"authorize_virtual_chunk_access names {prefix!r}, and the repository has no "
                "virtual chunk container there. Add it to the configuration, or leave it out here.",
                UserWarning,
                stacklevel=2,
            )
        kept = {it: access for it, access in given.items() if it not in missing}
        return replace(self, authorized=kept)


def _labelled(
    location: object, options: Mapping[str, object], attribution: Attribution | None
) -> dict[str, object]:
    """Return the options of a storage that sends labels with its requests."""
    labelled = dict(options)
    if attribution is None or attribution == Attribution() or not isinstance(location, str):
        return labelled
    given = {"workload": attribution.workload, "principal": attribution.principal}
    labels = "; ".join(f"{name}={value}" for name, value in given.items() if value is not None)
    client = f"{attribution.client} " if attribution.client else ""
    agent = f"{client}icechunk-async/{__version__}{f' ({labels})' if labels else ''}"
    if location.partition("://")[0] in _LABELLED:
        # A user agent that the caller gave stays.
        labelled.setdefault("user_agent", agent)
    return labelled


RepositoryHandle = handles.RepositoryHandle[Source, AsyncRepository]


@dataclass(frozen=True, slots=True)
class Held[N]:
    """An open native object, which methods made by `asked` put their questions to."""

    native: N

    async def ask[T](self, question: Callable[[N], Awaitable[T]]) -> T:
        """Put a question to it; on the portal's loop. Errors are the facade's."""
        with translated():
            return await question(self.native)
