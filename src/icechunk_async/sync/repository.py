"""Repositories with the official engine's names."""

from __future__ import annotations

from typing import TYPE_CHECKING, Self, cast

from icechunk_async.errors import VirtualContainerError
from icechunk_async.repository import Repository as AsyncRepository
from icechunk_async.sync._display import Displayed
from icechunk_async.sync._states import SpecVersion
from icechunk_async.sync.config import RepositoryConfig
from icechunk_async.sync.conversion import (
    given_access,
    given_config,
    given_version,
    shown_attribution,
    shown_place,
    shown_version,
    warn_of_none,
)
from icechunk_async.sync.errors import translated
from icechunk_async.sync.handles import RepositoryHandle, Source
from icechunk_async.sync.portal import run, run_async
from icechunk_async.sync.repository_administration import AdministrationOperations
from icechunk_async.sync.repository_history import HistoryOperations
from icechunk_async.sync.repository_refs import RefOperations
from icechunk_async.sync.repository_sessions import SessionOperations
from icechunk_async.sync.repository_upkeep import UpkeepOperations

if TYPE_CHECKING:
    from types import TracebackType

    from icechunk_async.engine.open import Location
    from icechunk_async.sync._display import Rows
    from icechunk_async.sync._states import Attribution
    from icechunk_async.sync.credentials import AnyCredential
    from icechunk_async.sync.storage import Storage, StorageSettings

    type Access = dict[str, AnyCredential | None] | None

__all__ = ["Repository"]


class Repository(
    SessionOperations,
    RefOperations,
    HistoryOperations,
    AdministrationOperations,
    UpkeepOperations,
    Displayed,
):
    """A versioned Zarr hierarchy in a storage.

    Opened by one of the class methods; wherever these take a ``storage``, they take a path, a URL
    or an open :class:`icechunk_async.storage.Storage` as well. Methods block; what blocks is
    awaited in the method of the same name with ``_async``, from any event loop.

    What it opened is closed by :meth:`close`, at the end of a ``with`` block, when nothing refers
    to it or to what was made from it any more, or with the process. It pickles as plain data,
    credentials included, and opens again where it is used.
    """

    def __init__(self, repository: RepositoryHandle) -> None:
        """Use :meth:`create`, :meth:`open` or :meth:`open_or_create`."""
        self._repository = repository

    def _rows(self) -> Rows:
        return [("storage", self.storage), ("config", "<RepositoryConfig ...>")]

    @classmethod
    async def _create(
        cls,
        source: Source,
        version: SpecVersion | int | None,
        *,
        check_clean_root: bool,
        or_open: bool = False,
    ) -> Self:
        handle = RepositoryHandle(source)
        with translated():
            await handle.enter(
                source.creating(
                    spec_version=given_version(version),
                    check_clean_root=check_clean_root,
                    or_open=or_open,
                )
            )
        return cls(handle)

    @classmethod
    def create(  # noqa: PLR0917 -- the official engine's order
        cls,
        storage: Storage | Location,
        config: RepositoryConfig | None = None,
        authorize_virtual_chunk_access: Access = None,
        spec_version: SpecVersion | int | None = None,
        check_clean_root: bool = True,  # noqa: FBT001, FBT002
        attribution: Attribution | None = None,
    ) -> Self:
        """Create a repository and open it.

        Args:
            storage: where.
            config: configuration; stored with the repository.
            authorize_virtual_chunk_access: see :meth:`open`.
            spec_version: version of the format, 1 or 2; the newest if None.
            check_clean_root: refuse a place that holds anything.
            attribution: see :meth:`open`.

        Raises:
            AlreadyExistsError: the place holds a repository, or anything at all.
            StorageError: commits could be lost there; nothing was written.
        """
        source = _source(storage, config, authorize_virtual_chunk_access, attribution)
        return run(cls._create(source, spec_version, check_clean_root=check_clean_root))

    @classmethod
    async def create_async(  # noqa: PLR0917
        cls,
        storage: Storage | Location,
        config: RepositoryConfig | None = None,
        authorize_virtual_chunk_access: Access = None,
        spec_version: SpecVersion | int | None = None,
        check_clean_root: bool = True,  # noqa: FBT001, FBT002
        attribution: Attribution | None = None,
    ) -> Self:
        """Await what :meth:`create` does."""
        source = _source(storage, config, authorize_virtual_chunk_access, attribution)
        return await run_async(cls._create(source, spec_version, check_clean_root=check_clean_root))

    @classmethod
    async def _open(cls, source: Source) -> Self:
        handle = RepositoryHandle(source)
        with translated():
            await handle.repository()
        return cls(handle)

    @classmethod
    def open(
        cls,
        storage: Storage | Location,
        config: RepositoryConfig | None = None,
        authorize_virtual_chunk_access: Access = None,
        attribution: Attribution | None = None,
    ) -> Self:
        """Open a repository; its format version is found out.

        Args:
            storage: where.
            config: laid over the stored configuration, for this handle only.
            authorize_virtual_chunk_access: containers of virtual chunks that may be read, by URL
                prefix, with the credentials for each.
            attribution: who asks, for the logs of the object store.

        Raises:
            RepositoryNotFoundError: there is none.
        """
        return run(cls._open(_source(storage, config, authorize_virtual_chunk_access, attribution)))

    @classmethod
    async def open_async(
        cls,
        storage: Storage | Location,
        config: RepositoryConfig | None = None,
        authorize_virtual_chunk_access: Access = None,
        attribution: Attribution | None = None,
    ) -> Self:
        """Await what :meth:`open` does."""
        return await run_async(
            cls._open(_source(storage, config, authorize_virtual_chunk_access, attribution))
        )

    @classmethod
    def open_or_create(  # noqa: PLR0917 -- the official engine's order
        cls,
        storage: Storage | Location,
        config: RepositoryConfig | None = None,
        authorize_virtual_chunk_access: Access = None,
        create_version: SpecVersion | int | None = None,
        check_clean_root: bool = True,  # noqa: FBT001, FBT002
        attribution: Attribution | None = None,
    ) -> Self:
        """Open the repository at a place, or create one if there is none.

        Args and errors as :meth:`open` and :meth:`create`; ``create_version`` is the format of
        one that is created.
        """
        source = _source(storage, config, authorize_virtual_chunk_access, attribution)
        return run(
            cls._create(source, create_version, check_clean_root=check_clean_root, or_open=True)
        )

    @classmethod
    async def open_or_create_async(  # noqa: PLR0917
        cls,
        storage: Storage | Location,
        config: RepositoryConfig | None = None,
        authorize_virtual_chunk_access: Access = None,
        create_version: SpecVersion | int | None = None,
        check_clean_root: bool = True,  # noqa: FBT001, FBT002
        attribution: Attribution | None = None,
    ) -> Self:
        """Await what :meth:`open_or_create` does."""
        source = _source(storage, config, authorize_virtual_chunk_access, attribution)
        return await run_async(
            cls._create(source, create_version, check_clean_root=check_clean_root, or_open=True)
        )

    @staticmethod
    def exists(
        storage: Storage | Location, storage_settings: StorageSettings | None = None
    ) -> bool:
        """Return whether a place holds a repository.

        Args:
            storage: where.
            storage_settings: accepted; the few reads of this use the defaults.
        """
        return run(_version(storage)) > 0

    @staticmethod
    async def exists_async(
        storage: Storage | Location, storage_settings: StorageSettings | None = None
    ) -> bool:
        """Await what :meth:`exists` answers."""
        return await run_async(_version(storage)) > 0

    @staticmethod
    def fetch_spec_version(
        storage: Storage | Location, storage_settings: StorageSettings | None = None
    ) -> SpecVersion | None:
        """Return the format version of the repository at a place; None if there is none.

        Args:
            storage: where.
            storage_settings: accepted; the few reads of this use the defaults.
        """
        return shown_version(run(_version(storage)))

    @staticmethod
    async def fetch_spec_version_async(
        storage: Storage | Location, storage_settings: StorageSettings | None = None
    ) -> SpecVersion | None:
        """Await what :meth:`fetch_spec_version` answers."""
        return shown_version(await run_async(_version(storage)))

    @staticmethod
    def fetch_config(storage: Storage | Location) -> RepositoryConfig | None:
        """Return the configuration that is stored with a repository; None if none is.

        Raises:
            RepositoryNotFoundError: there is no repository.
        """
        return run(_stored_config(storage))

    @staticmethod
    async def fetch_config_async(storage: Storage | Location) -> RepositoryConfig | None:
        """Await what :meth:`fetch_config` answers."""
        return await run_async(_stored_config(storage))

    def save_config(self) -> None:
        """Store the configuration in force, for everyone who opens the repository from now on.

        Raises:
            ConflictError: somebody else changed it meanwhile; nothing was stored.
        """
        self._ask(lambda it: it.save_config())

    async def save_config_async(self) -> None:
        """Await what :meth:`save_config` does."""
        await self._ask_async(lambda it: it.save_config())

    async def _reopen(self, config: RepositoryConfig | None, access: Access) -> Self:
        native, source = await self._repository.repository(), self._repository.source
        source = source.changed(config, access)
        while True:
            handle = RepositoryHandle(source)
            try:
                await handle.enter(native.reopen(given_config(config), given_access(access)))
            except VirtualContainerError as error:
                source = source.without(error)
                access = dict(source.authorized or {})
            else:
                return type(self)(handle)

    def reopen(
        self,
        config: RepositoryConfig | None = None,
        authorize_virtual_chunk_access: Access = None,
    ) -> Self:
        """Open another handle on the same repository.

        Args:
            config: laid over the configuration in force here.
            authorize_virtual_chunk_access: in place of what is authorised here; None keeps it.
        """
        warn_of_none(authorize_virtual_chunk_access, stacklevel=3)
        return run(self._reopen(config, authorize_virtual_chunk_access))

    async def reopen_async(
        self,
        config: RepositoryConfig | None = None,
        authorize_virtual_chunk_access: Access = None,
    ) -> Self:
        """Await what :meth:`reopen` does."""
        warn_of_none(authorize_virtual_chunk_access, stacklevel=3)
        return await run_async(self._reopen(config, authorize_virtual_chunk_access))

    def __getstate__(self) -> object:
        """Return plain data: what was given at the opening, credentials included."""
        return {"_repository": self._repository.source}

    def __setstate__(self, state: object) -> None:
        """Be the same repository; it is opened at the first use."""
        if not isinstance(state, dict):
            raise ValueError("Invalid repository state")  # noqa: TRY004 -- the official engine's
        self._repository = RepositoryHandle(cast("dict[str, Source]", state)["_repository"])

    @property
    def config(self) -> RepositoryConfig:
        """The configuration in force: defaults, stored, and given at opening, in this order."""
        return RepositoryConfig.from_native(self._repository.now().config)

    @property
    def attribution(self) -> Attribution:
        """Who asks, as given at the opening."""
        return shown_attribution(self._repository.source.attribution)

    @property
    def storage(self) -> Storage:
        """Where the repository is."""
        return self._repository.source.storage

    @property
    def authorized_virtual_container_prefixes(self) -> set[str]:
        """URL prefixes of the virtual chunk containers that this handle may read."""
        return set(self._repository.now().authorized_virtual_prefixes)

    @property
    def spec_version(self) -> SpecVersion:
        """The format version that new files are written to."""
        return SpecVersion(self._repository.now().spec_version)

    def close(self) -> None:
        """Close what was opened; sessions and stores cannot be used afterwards."""
        self._repository.close()

    def __enter__(self) -> Self:
        """Return the repository; it closes with the block."""
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc_value: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """Close what was opened."""
        self.close()


def _source(
    storage: Storage | Location,
    config: RepositoryConfig | None,
    access: Access,
    attribution: Attribution | None,
) -> Source:
    warn_of_none(access)
    return Source(shown_place(storage), config, access, attribution)


async def _version(storage: Storage | Location) -> int:
    location, options = await shown_place(storage).place()
    with translated():
        return await AsyncRepository.fetch_spec_version(location, storage_options=options)


async def _stored_config(storage: Storage | Location) -> RepositoryConfig | None:
    location, options = await shown_place(storage).place()
    with translated():
        config = await AsyncRepository.fetch_config(location, storage_options=options)
    return None if config is None else RepositoryConfig.from_native(config)
