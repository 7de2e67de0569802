"""Storages that spoil conditional writes, deletions or copies; each breaks one promise."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import replace
from itertools import islice
from typing import TYPE_CHECKING

from icechunk_async.errors import (
    ObjectNotFoundError,
    PreconditionFailedError,
    StorageError,
)
from icechunk_async.storage import (
    ABSENT,
    Capabilities,
    Data,
    DeleteFailure,
    Expected,
    ObjectInfo,
    RangeRequest,
    Retrieved,
    Version,
    check_key,
)
from tests.conformance.flawed import Flawed, breaks, look_then_write, turn

if TYPE_CHECKING:
    from collections.abc import Iterable

    from icechunk_async_memory import MemoryStorage

# -- conditional writes


@breaks("test_a_creation_lands_where_nothing_is")
class RefusesToCreate(Flawed):
    """Wants an object for every condition."""

    async def put(self, key: str, data: Data, *, if_version: Expected = None) -> Version:
        """Refuse creations."""
        if if_version is ABSENT:
            raise PreconditionFailedError("412", key=key, expected=if_version)
        return await self.inner.put(key, data, if_version=if_version)


@breaks("test_a_creation_is_refused_where_something_is")
class CreatesOverWhatIsThere(Flawed):
    """Does not know ``If-None-Match``."""

    async def put(self, key: str, data: Data, *, if_version: Expected = None) -> Version:
        """Ignore the condition."""
        expected = None if if_version is ABSENT else if_version
        return await self.inner.put(key, data, if_version=expected)


@breaks("test_a_creation_is_refused_where_something_is")
class ChangesWhatItRefuses(Flawed):
    """Notices too late that the object was there."""

    async def put(self, key: str, data: Data, *, if_version: Expected = None) -> Version:
        """Refuse after the write."""
        try:
            return await self.inner.put(key, data, if_version=if_version)
        except PreconditionFailedError:
            await self.inner.put(key, data)
            raise


@breaks("test_a_creation_lands_after_a_deletion")
class KeepsTombstones(Flawed):
    """Takes a deleted object for one that is there."""

    def __init__(self, inner: MemoryStorage) -> None:
        """Begin without any."""
        super().__init__(inner)
        self._deleted: set[str] = set()

    async def put(self, key: str, data: Data, *, if_version: Expected = None) -> Version:
        """Refuse deleted keys."""
        if if_version is ABSENT and key in self._deleted:
            raise PreconditionFailedError("412", key=key, expected=if_version)
        return await self.inner.put(key, data, if_version=if_version)

    async def delete(self, keys: Iterable[str]) -> list[DeleteFailure]:
        """Keep the keys."""
        wanted = list(keys)
        self._deleted.update(wanted)
        return await self.inner.delete(wanted)


@breaks("test_an_update_of_the_current_version_lands")
class AnswersVersionsThatItDoesNotKnow(Flawed):
    """Puts quotes around versions, and does not take them off again."""

    async def put(self, key: str, data: Data, *, if_version: Expected = None) -> Version:
        """Return a version with quotes."""
        version = await self.inner.put(key, data, if_version=if_version)
        return Version(f'"{version.token}"')


@breaks("test_an_update_of_an_older_version_is_refused")
class UpdatesAnyVersion(Flawed):
    """Does not know ``If-Match``."""

    async def put(self, key: str, data: Data, *, if_version: Expected = None) -> Version:
        """Ignore the version."""
        if isinstance(if_version, Version):
            if_version = (await self.inner.get(key)).version
        return await self.inner.put(key, data, if_version=if_version)


@breaks("test_an_update_of_a_missing_object_is_refused")
class UpdatesWhatIsNotThere(Flawed):
    """Takes a missing object for one that matches."""

    async def put(self, key: str, data: Data, *, if_version: Expected = None) -> Version:
        """Create instead."""
        try:
            await self.inner.get(key)
        except ObjectNotFoundError:
            return await self.inner.put(key, data)
        return await self.inner.put(key, data, if_version=if_version)


@breaks("test_an_update_with_a_made_up_version_is_refused")
class TakesVersionsForPatterns(Flawed):
    """Sends ``If-Match: *``."""

    async def put(self, key: str, data: Data, *, if_version: Expected = None) -> Version:
        """Let a star match."""
        expected = None if if_version == Version("*") else if_version
        return await self.inner.put(key, data, if_version=expected)


@breaks("test_a_refusal_tells_key_and_expectation")
class RefusesWithoutAWord(Flawed):
    """Raises an error without context."""

    async def put(self, key: str, data: Data, *, if_version: Expected = None) -> Version:
        """Hide what was refused."""
        try:
            return await self.inner.put(key, data, if_version=if_version)
        except PreconditionFailedError as error:
            raise PreconditionFailedError("412") from error


@breaks("test_conditional_writes_that_are_not_promised_are_refused")
class DoesWhatItDoesNotPromise(Flawed):
    """Says that it is not atomic, and writes all the same."""

    @property
    def capabilities(self) -> Capabilities:
        """Not atomic."""
        reasons = dict.fromkeys(("conditional_create", "conditional_update"), "it has no locks")
        return replace(
            self.inner.capabilities,
            conditional_create=False,
            conditional_update=False,
            reasons=reasons,
        )


@breaks(
    "test_of_racing_creators_exactly_one_wins",
    "test_creators_and_updaters_exclude_each_other",
)
class LooksThenCreates(Flawed):
    """Looks and creates in two steps."""

    async def put(self, key: str, data: Data, *, if_version: Expected = None) -> Version:
        """Let others come in between."""
        if if_version is ABSENT:
            return await look_then_write(self.inner, key, data, if_version)
        return await self.inner.put(key, data, if_version=if_version)


@breaks(
    "test_of_racing_updaters_exactly_one_wins",
    "test_creators_and_updaters_exclude_each_other",
    "test_increments_by_racing_writers_are_not_lost",
    "test_an_update_does_not_hide_a_put",
    "test_an_update_does_not_revive_a_deleted_object",
)
class LooksThenUpdates(Flawed):
    """Looks and updates in two steps."""

    async def put(self, key: str, data: Data, *, if_version: Expected = None) -> Version:
        """Let others come in between."""
        if isinstance(if_version, Version):
            return await look_then_write(self.inner, key, data, if_version)
        return await self.inner.put(key, data, if_version=if_version)


@breaks(
    "test_of_creators_in_several_processes_exactly_one_wins",
    "test_increments_by_several_processes_are_not_lost",
)
class IsNotShared(Flawed):
    """Says that other processes see the same objects, and they do not."""

    @property
    def capabilities(self) -> Capabilities:
        """Everything."""
        return Capabilities()


# -- deletions


@breaks("test_a_deleted_object_is_gone")
class DeletesNothing(Flawed):
    """Says that it deleted."""

    async def delete(self, keys: Iterable[str]) -> list[DeleteFailure]:
        """Check the keys, at least."""
        for key in keys:
            check_key(key)
        return []


@breaks("test_a_missing_object_counts_as_deleted")
class ReportsMissingObjects(Flawed):
    """Takes a missing object for a failure."""

    async def delete(self, keys: Iterable[str]) -> list[DeleteFailure]:
        """Report what is missing."""
        failures: list[DeleteFailure] = []
        for key in dict.fromkeys(keys):
            try:
                await self.inner.get(key)
            except ObjectNotFoundError as error:
                failures.append(DeleteFailure(key, error))
            await self.inner.delete([key])
        return failures


@breaks("test_a_key_is_no_prefix_when_deleting")
class DeletesFolders(Flawed):
    """Deletes what lies below a key as well."""

    async def delete(self, keys: Iterable[str]) -> list[DeleteFailure]:
        """Delete too much."""
        for key in keys:
            below = self.inner.list_prefix(key + "/")
            found = [entry.key async for entry in below if isinstance(entry, ObjectInfo)]
            await self.inner.delete([key, *found])
        return []


@breaks("test_many_objects_are_deleted_at_once")
class DeletesOnePage(Flawed):
    """Sends one request and drops the keys that do not fit."""

    async def delete(self, keys: Iterable[str]) -> list[DeleteFailure]:
        """Delete the first thousand."""
        return await self.inner.delete(islice(keys, 1000))


@breaks("test_a_key_may_be_given_twice")
class MissesWhatItDeletedItself(Flawed):
    """Takes a key that comes again for a failure."""

    async def delete(self, keys: Iterable[str]) -> list[DeleteFailure]:
        """Report keys that come again."""
        wanted = list(keys)
        await self.inner.delete(wanted)
        again = {key for key in wanted if wanted.count(key) > 1}
        return [DeleteFailure(key, StorageError("404")) for key in again]


@breaks("test_keys_may_come_from_a_generator")
class ReadsTheKeysTwice(Flawed):
    """Checks the keys, and finds none left to delete."""

    async def delete(self, keys: Iterable[str]) -> list[DeleteFailure]:
        """Use up the keys."""
        for key in keys:
            check_key(key)
        return await self.inner.delete(keys)


@breaks("test_deleting_nothing_is_no_failure")
class TakesNoKeysForAll(Flawed):
    """Deletes below the empty prefix."""

    async def delete(self, keys: Iterable[str]) -> list[DeleteFailure]:
        """Delete everything where nothing was said."""
        wanted = list(keys)
        everything = [e.key for e in await self.everything() if isinstance(e, ObjectInfo)]
        return await self.inner.delete(wanted or everything)


@breaks("test_a_deleted_key_can_be_written_again")
class HidesWhatWasDeleted(Flawed):
    """Remembers deletions longer than objects."""

    def __init__(self, inner: MemoryStorage) -> None:
        """Begin without any."""
        super().__init__(inner)
        self._hidden: set[str] = set()

    async def get(self, key: str, byte_range: RangeRequest = None) -> Retrieved:
        """Miss what was written again."""
        if key in self._hidden:
            raise ObjectNotFoundError("404", key=key)
        return await self.inner.get(key, byte_range)

    async def delete(self, keys: Iterable[str]) -> list[DeleteFailure]:
        """Remember."""
        wanted = list(keys)
        self._hidden.update(wanted)
        return await self.inner.delete(wanted)


@breaks("test_a_deleted_key_can_be_written_again")
class LeavesFoldersInTheWay(Flawed):
    """Keeps empty folders, where no object can be."""

    def __init__(self, inner: MemoryStorage) -> None:
        """Begin without any."""
        super().__init__(inner)
        self._folders: set[str] = set()

    async def put(self, key: str, data: Data, *, if_version: Expected = None) -> Version:
        """Make folders, and fail where one is."""
        if key in self._folders:
            raise StorageError("Is a directory")
        folder = key.rpartition("/")[0]
        while folder:
            self._folders.add(folder)
            folder = folder.rpartition("/")[0]
        return await self.inner.put(key, data, if_version=if_version)


@breaks("test_a_failed_deletion_is_reported_and_the_others_are_done")
class SwallowsFailedDeletions(Flawed):
    """Writes failures to a log."""

    async def delete(self, keys: Iterable[str]) -> list[DeleteFailure]:
        """Say nothing."""
        await super().delete(keys)
        return []


@breaks("test_a_failed_deletion_is_reported_and_the_others_are_done")
class StopsAtAFailedDeletion(Flawed):
    """Leaves what comes after a failure."""

    async def delete(self, keys: Iterable[str]) -> list[DeleteFailure]:
        """Stop early."""
        for key in keys:
            failures = await super().delete([key])
            if failures:
                return failures
        return []


# -- copies


@breaks("test_a_copy_has_the_bytes_of_its_source")
class MovesInsteadOfCopying(Flawed):
    """Renames."""

    async def copy(self, source: str, target: str, *, if_version: Version | None = None) -> Version:
        """Lose the source."""
        version = await self.inner.copy(source, target, if_version=if_version)
        await self.inner.delete([source])
        return version


@breaks("test_a_copy_replaces_an_object")
class DoesNotCopyOver(Flawed):
    """Leaves a target that is there."""

    async def copy(self, source: str, target: str, *, if_version: Version | None = None) -> Version:
        """Skip the copy."""
        with suppress(ObjectNotFoundError):
            return (await self.inner.get(target)).version
        return await self.inner.copy(source, target, if_version=if_version)


@breaks("test_an_empty_and_a_large_object_can_be_copied")
class CopiesOnlyOnePart(Flawed):
    """Copies as much as one request takes."""

    async def copy(self, source: str, target: str, *, if_version: Version | None = None) -> Version:
        """Copy the first part."""
        data = (await self.inner.get(source)).data
        return await self.inner.put(target, data[: 5 << 20])


@breaks("test_a_copy_of_a_missing_object_raises")
class CopiesNothingToSomething(Flawed):
    """Opens the target before the source."""

    async def copy(self, source: str, target: str, *, if_version: Version | None = None) -> Version:
        """Leave an empty target."""
        check_key(source)
        await self.inner.put(target, b"")
        return await self.inner.copy(source, target, if_version=if_version)


@breaks("test_a_copy_of_the_expected_version_lands")
class ExpectsTheVersionOfTheTarget(Flawed):
    """Takes the condition for one on the target."""

    async def copy(self, source: str, target: str, *, if_version: Version | None = None) -> Version:
        """Compare the wrong object."""
        data = (await self.inner.get(source)).data
        return await self.inner.put(target, data, if_version=if_version)


@breaks("test_a_copy_of_another_version_is_refused")
class CopiesAnyVersion(Flawed):
    """Ignores the condition."""

    async def copy(self, source: str, target: str, *, if_version: Version | None = None) -> Version:
        """Copy."""
        return await self.inner.copy(source, target)


@breaks(
    "test_an_object_can_be_copied_onto_itself",
    "test_a_cancelled_copy_leaves_the_old_object_or_the_new",
)
class EmptiesTheTargetFirst(Flawed):
    """Truncates the target before it reads the source."""

    async def copy(self, source: str, target: str, *, if_version: Version | None = None) -> Version:
        """Copy in place."""
        await self.inner.get(source)
        await self.inner.put(target, b"")
        await turn()
        return await self.inner.copy(source, target, if_version=if_version)


@breaks("test_a_copy_is_independent_of_its_source")
class CopiesByReference(Flawed):
    """Keeps a link instead of a copy."""

    def __init__(self, inner: MemoryStorage) -> None:
        """Begin without links."""
        super().__init__(inner)
        self._links: dict[str, str] = {}

    async def copy(self, source: str, target: str, *, if_version: Version | None = None) -> Version:
        """Remember where the bytes are."""
        self._links[target] = source
        return await self.inner.copy(source, target, if_version=if_version)

    async def get(self, key: str, byte_range: RangeRequest = None) -> Retrieved:
        """Follow the link."""
        return await self.inner.get(self._links.get(key, key), byte_range)


@breaks("test_a_copy_is_whole_while_its_source_is_replaced")
class CopiesInSteps(Flawed):
    """Reads the source in two steps."""

    async def copy(self, source: str, target: str, *, if_version: Version | None = None) -> Version:
        """Put two halves together."""
        first = bytes((await self.inner.get(source)).data)
        await turn()
        second = bytes((await self.inner.get(source)).data)
        half = len(first) // 2
        return await self.inner.put(target, first[:half] + second[half:])

    async def put(self, key: str, data: Data, *, if_version: Expected = None) -> Version:
        """Let copies come in between."""
        await turn()
        return await self.inner.put(key, data, if_version=if_version)
