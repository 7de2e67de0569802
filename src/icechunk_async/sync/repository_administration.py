"""What belongs to the repository itself: metadata, status, feature flags, commit defaults."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from icechunk_async.format.operations_log import Availability
from icechunk_async.repository import RepoStatus as Status
from icechunk_async.sync._states import FeatureFlag, RepoAvailability, RepoStatus
from icechunk_async.sync.asking import Asking

if TYPE_CHECKING:
    from collections.abc import Iterable

    from icechunk_async.engine.history.protocol import FeatureFlag as Flag


__all__ = ["AdministrationOperations"]


class AdministrationOperations(Asking):
    """A base of the repository. But for commit defaults, all of this needs format version 2."""

    def set_default_commit_metadata(self, metadata: dict[str, Any]) -> None:
        """Give every later commit of this handle these properties; a commit's own come on top."""
        self._repository.set_default_metadata(metadata)

    def default_commit_metadata(self) -> dict[str, Any]:
        """Return the properties that every commit of this handle gets."""
        return dict(self._repository.source.default_metadata)

    def get_metadata(self) -> dict[str, Any]:
        """Return the repository's own metadata."""
        return self._ask(lambda it: it.get_metadata())

    @property
    def metadata(self) -> dict[str, Any]:
        """The repository's own metadata, as stored now."""
        return self.get_metadata()

    async def get_metadata_async(self) -> dict[str, Any]:
        """Await what :meth:`get_metadata` answers."""
        return await self._ask_async(lambda it: it.get_metadata())

    def set_metadata(self, metadata: dict[str, Any]) -> None:
        """Replace the repository's own metadata.

        Raises:
            InvalidInputError: a value is not JSON; nothing changed.
            ReadOnlyError: the repository's status forbids changes.
        """
        self._ask(lambda it: it.set_metadata(metadata))

    async def set_metadata_async(self, metadata: dict[str, Any]) -> None:
        """Await what :meth:`set_metadata` does."""
        await self._ask_async(lambda it: it.set_metadata(metadata))

    def update_metadata(self, metadata: dict[str, Any]) -> dict[str, Any]:
        """Lay ``metadata`` over the repository's own and answer the result.

        Raises: as :meth:`set_metadata`.
        """
        return self._ask(lambda it: it.update_metadata(metadata))

    async def update_metadata_async(self, metadata: dict[str, Any]) -> dict[str, Any]:
        """Await what :meth:`update_metadata` does."""
        return await self._ask_async(lambda it: it.update_metadata(metadata))

    def get_status(self) -> RepoStatus:
        """Return whether the repository may be changed, since when and why."""
        return _status(self._ask(lambda it: it.get_status()))

    @property
    def status(self) -> RepoStatus:
        """Whether the repository may be changed, as stored now."""
        return self.get_status()

    async def get_status_async(self) -> RepoStatus:
        """Await what :meth:`get_status` answers."""
        return _status(await self._ask_async(lambda it: it.get_status()))

    def set_status(self, status: RepoStatus) -> None:
        """Say whether the repository may be changed.

        Writers honour it from their next change on; the storage does not enforce it.
        """
        given = _given(status)
        self._ask(lambda it: it.set_status(given))

    async def set_status_async(self, status: RepoStatus) -> None:
        """Await what :meth:`set_status` does."""
        given = _given(status)
        await self._ask_async(lambda it: it.set_status(given))

    def feature_flags(self) -> list[FeatureFlag]:
        """Return every feature that can be switched, and whether it is on."""
        return _flags(self._ask(lambda it: it.feature_flags()))

    async def feature_flags_async(self) -> list[FeatureFlag]:
        """Await what :meth:`feature_flags` answers."""
        return _flags(await self._ask_async(lambda it: it.feature_flags()))

    def enabled_feature_flags(self) -> list[FeatureFlag]:
        """Return the features that are on."""
        return _flags(self._ask(lambda it: it.enabled_feature_flags()))

    async def enabled_feature_flags_async(self) -> list[FeatureFlag]:
        """Await what :meth:`enabled_feature_flags` answers."""
        return _flags(await self._ask_async(lambda it: it.enabled_feature_flags()))

    def disabled_feature_flags(self) -> list[FeatureFlag]:
        """Return the features that are off."""
        return _flags(self._ask(lambda it: it.disabled_feature_flags()))

    async def disabled_feature_flags_async(self) -> list[FeatureFlag]:
        """Await what :meth:`disabled_feature_flags` answers."""
        return _flags(await self._ask_async(lambda it: it.disabled_feature_flags()))

    def set_feature_flag(self, name: str, setting: bool | None) -> None:  # noqa: FBT001
        """Switch a feature on or off, or back to its default with None.

        Raises:
            InvalidInputError: there is no such feature.
        """
        self._ask(lambda it: it.set_feature_flag(name, setting))

    async def set_feature_flag_async(self, name: str, setting: bool | None) -> None:  # noqa: FBT001
        """Await what :meth:`set_feature_flag` does."""
        await self._ask_async(lambda it: it.set_feature_flag(name, setting))


def _status(status: Status) -> RepoStatus:
    assert status.set_at is not None  # it was stored
    return RepoStatus(
        RepoAvailability[status.availability.name.lower()],
        status.set_at,
        status.limited_availability_reason,
    )


def _given(status: RepoStatus) -> Status:
    return Status(
        Availability[status.availability.name.upper()],
        status.set_at,
        status.limited_availability_reason,
    )


def _flags(flags: Iterable[Flag]) -> list[FeatureFlag]:
    return [FeatureFlag(it.id, it.name, it.default_enabled, it.setting, it.enabled) for it in flags]
