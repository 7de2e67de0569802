"""Copy a repository to another storage, byte for byte, and bring the copy up to date later.

What never changes is copied first: chunks, manifests, transaction logs, snapshots. The references
come last, by compare-and-set, so the destination shows the repository as it was at one moment, or
as the last copy left it, and never a part of a snapshot.

There are two ways to find what to copy. The first copy of a whole repository compares listings:
that costs one request for a thousand objects, reads no manifest, and brings the objects of sessions
that are still open. All others follow the history: what snapshots need that the destination does
not have. If an earlier copy was interrupted, listings tell what it had brought.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from icechunk_async._runtime import clock, telemetry
from icechunk_async._runtime.concurrency import closing, gather
from icechunk_async._runtime.dataclasses import dataclass
from icechunk_async._runtime.progress import no_progress
from icechunk_async.engine.history.outcomes import read_if_there
from icechunk_async.engine.history.settings import OwnSettings
from icechunk_async.engine.open import Request as OpenRequest
from icechunk_async.engine.open import as_snapshot_id, check_safe, open_location
from icechunk_async.engine.policies import policies_of
from icechunk_async.engine.upkeep.copying import contents
from icechunk_async.engine.upkeep.copying.contents import Needs, find_needs
from icechunk_async.engine.upkeep.copying.derivation import AS_IT_IS, Derivation, as_paths
from icechunk_async.engine.upkeep.copying.deriving import GUARD_SECONDS, Deriving
from icechunk_async.engine.upkeep.copying.marks import (
    Mark,
    References,
    changes_since,
    read_references,
)
from icechunk_async.engine.upkeep.copying.plan import Plan, assets_of, make_plan
from icechunk_async.engine.upkeep.copying.selection import WHOLE, Selection
from icechunk_async.engine.upkeep.copying.transfer import ByService, Transfer
from icechunk_async.engine.virtual.naming import container_at
from icechunk_async.errors import (
    ConflictError,
    FormatError,
    InvalidInputError,
    ObjectNotFoundError,
    OutcomeUnknownError,
    PreconditionFailedError,
    RepositoryExistsError,
    SnapshotNotFoundError,
    UnsafeStorageError,
)
from icechunk_async.format.envelope import FileType, unpack
from icechunk_async.format.ids import INITIAL_SNAPSHOT_ID, SnapshotId
from icechunk_async.format.layout import (
    CONFIG,
    REPO_INFO,
    backup_key,
    is_written_once,
    new_backup_name,
    snapshot_key,
)
from icechunk_async.format.snapshot import decode_snapshot
from icechunk_async.storage import ABSENT, ObjectInfo
from icechunk_async.storage.policies.limit import Budget
from icechunk_async.storage.policies.stack import with_policies

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping
    from collections.abc import Set as AbstractSet
    from datetime import datetime
    from typing import Literal

    from icechunk_async._runtime.progress import ProgressCallback
    from icechunk_async.engine.files.assets import Assets
    from icechunk_async.engine.open import Engine, Location
    from icechunk_async.format.id_set import IdSet
    from icechunk_async.format.manifest.writing import LocationDictionary
    from icechunk_async.format.repo_info import RepoInfo, SnapshotInfo
    from icechunk_async.storage import Retrieved, Storage, Version

    type _Change = Literal["created", "moved", "deleted"]

__all__ = ["CopyReport", "RefChange", "copy_repository", "copy_to"]

_ROUNDS: Final = 5
_NAMED_AT_MOST: Final = 10
"""Changes that an error message names."""
_CACHED_NODES: Final = 200_000
"""The nodes of derived snapshots that are cached: those snapshots are read several times."""


@dataclass(frozen=True, slots=True)
class RefChange:
    """A branch or tag of the destination that a copy changed."""

    kind: Literal["branch", "tag"]
    name: str
    change: _Change
    before: SnapshotId | None
    """None if it was created."""
    after: SnapshotId | None
    """None if it was deleted."""


@dataclass(frozen=True, slots=True)
class CopyReport:
    """The objects that one call copied, and what it changed."""

    objects_copied: int
    """References included."""
    bytes_copied: int
    """Of the objects that were read and written."""
    objects_skipped: int
    """Those that an earlier copy had brought. A copy that follows the history does not look at
    them."""
    objects_by_service: int = 0
    """Those of ``objects_copied`` that the storage service copied, because both storages are of
    one service. Their bytes did not pass through this process, and are not counted."""
    refs: tuple[RefChange, ...] = ()
    """In a first copy, all of them."""
    discarded: tuple[str, ...] = ()
    """Changes that somebody had made at the destination and this copy undid, in words."""
    origin_prefix: str | None = None
    """The URL prefix that readers of a shallow copy authorize."""


async def copy_to(
    engine: Engine,
    destination: Location,
    storage_options: Mapping[str, object],
    *,
    refs: Iterable[str] | None,
    since: datetime | SnapshotId | str | None,
    paths: Iterable[str] | None,
    shallow: bool,
    discard_changes: bool,
    progress: ProgressCallback | None,
) -> CopyReport:
    """Open the destination and copy to it; see `Repository.copy_to`."""
    engine.history.capabilities.require("upkeep")
    request = OpenRequest(destination, storage_options, engine.config, {})
    request.check_types()
    with telemetry.span("copy_to"):
        container = container_at(engine.storage.description) if shallow else None
        derivation = Derivation(as_paths(paths), container)
        selection = Selection.of(refs, await _moment(engine, since))
        async with open_location(request) as storage:
            check_outside(engine.storage, storage)
            check_safe(storage)
            budget = Budget(engine.config.effective_max_concurrent_requests)
            policies = policies_of(engine.config.effective_storage)
            target = with_policies(storage, budget, policies, immutable=is_written_once)
            service = ByService.between(engine.assets.backend, storage)
            return await copy_repository(
                engine.storage,
                target,
                selection,
                derivation,
                dictionary=engine.manifest_options.location_dictionary,
                discard_changes=discard_changes,
                service=service and with_policies(service, budget, policies, immutable=_never),
                progress=progress or no_progress,
            )


def check_outside(source: Storage, destination: Storage) -> None:
    """Refuse a destination below the repository that is to be copied.

    Two services can have places of one name; their options differ.

    Raises:
        InvalidInputError: it is.
    """
    ours, theirs = source.description, destination.description
    below = theirs.url.startswith(f"{ours.url.rstrip('/')}/") and theirs.url != ours.url
    if below and (ours.url.startswith("file:") or ours.options == theirs.options):
        raise InvalidInputError(
            f"{theirs.url!r} lies within the repository that is to be copied, {ours.url!r}. Copy "
            "to another location."
        )


def _never(_: str) -> bool:
    return False


async def _moment(engine: Engine, since: datetime | SnapshotId | str | None) -> int | None:
    """Return the time that history begins at; that of a snapshot if one is named."""
    if since is None:
        return None
    if isinstance(since, SnapshotId | str):
        return (await engine.assets.snapshot(as_snapshot_id(since))).flushed_at
    if since.tzinfo is None:
        raise InvalidInputError(
            f"The time to copy from, {since.isoformat()}, has no time zone. Give one, such as "
            "datetime.now(UTC) - timedelta(days=30)."
        )
    return clock.to_us(since)


async def copy_repository(
    source: Storage,
    destination: Storage,
    selection: Selection = WHOLE,
    derivation: Derivation = AS_IT_IS,
    *,
    dictionary: LocationDictionary | None = None,
    discard_changes: bool = False,
    service: Storage | None = None,
    progress: ProgressCallback = no_progress,
) -> CopyReport:
    """Copy a repository, or bring an earlier copy of it up to date.

    Writers may commit to the source, expire its snapshots and collect its garbage meanwhile: the
    copy is of the state that was read first, or of a later one where that state was not whole any
    more.

    Args:
        source: the storage of the repository; it must be able to list.
        destination: another storage: empty, or with an earlier copy.
        selection: the branches and tags to copy, and how much of their history.
        derivation: the nodes to copy, and whether chunks stay where they are.
        dictionary: how locations of chunks that stay are compressed; None: they are not.
        discard_changes: undo what somebody changed in the copy, instead of refusing.
        service: a `ByService` between the two, if there is one.
        progress: told how many objects were looked at.

    Raises:
        InvalidInputError: the destination is the source; nothing was written.
        RepositoryExistsError: the destination holds something that no copy put there, a
            copy of another repository, of another kind, or of branches, tags and paths that are
            not selected now, or the copy was committed to; nothing was written.
        NotFoundError: a selected name is neither a branch nor a tag, or a path is at no tip;
            nothing was written.
        ConflictError: the references of the destination changed while
            objects were copied, or garbage collection outruns the copy;
            the destination shows what it did before.
        UnsafeStorageError: the source cannot list, or the destination cannot be written safely;
            nothing was written.
        OutcomeUnknownError: no answer came when references were written. Copy again: if they
            landed, that costs a few requests.

    Cost: three requests if nothing changed, and with format version 1 those of reading the
    references. Else see `find_needs`, and for snapshots that are derived `Deriving.bring`; or if
    this is the first copy of a whole repository, an earlier one was interrupted, or with format
    version 1, both storages are listed. Each object that is missing is read and written once. If
    a whole repository keeps statistics of chunks with its commits, these are listed.
    Memory: at most 256 MiB of objects, or one object if that is larger, and 12 bytes for each
    chunk that is copied.

    Cancellation: the destination shows what it did before, or the new state whole (format
    version 1: each branch and tag by itself). Copying again continues.
    """
    if not source.capabilities.listing and derivation.container is None:
        reason = source.capabilities.reasons.get("listing", "no reason given")
        raise UnsafeStorageError(
            f"The repository at {source.description.url!r} cannot be copied: its objects cannot "
            f"be listed ({reason}). Copy it through a storage that lists.",
            missing=["listing"],
        )
    transfer = Transfer(source, destination, progress, service)
    work = _Copying(source, destination, selection, derivation, transfer)
    work.dictionary, work.discard_changes, work.progress = dictionary, discard_changes, progress
    for _ in range(_ROUNDS):
        if (report := await work.round()) is not None:
            return report
    raise ConflictError(
        f"Copying {source.description.url!r} was given up after {_ROUNDS} rounds: each time, "
        "garbage collection deleted objects of the state that was being copied. The destination "
        "shows what it did before, and keeps what was copied. Copy again when no snapshots "
        "are expired."
    ) from work.lost


class _Copying:
    """One call: what was copied so far, over several rounds if the source changes."""

    def __init__(
        self,
        source: Storage,
        destination: Storage,
        selection: Selection,
        derivation: Derivation,
        transfer: Transfer,
    ) -> None:
        self._source = source
        self._destination = destination
        self._selection = selection
        self._derivation = derivation
        self._transfer = transfer
        self.dictionary: LocationDictionary | None = None
        self.discard_changes = False
        self.progress: ProgressCallback = no_progress
        self._discarded: tuple[str, ...] = ()
        self.lost: Exception | None = None
        """The error for an object that was missing in the last round, if it is known."""

    @property
    def _url(self) -> str:
        return self._destination.description.url

    async def round(self) -> CopyReport | None:
        """Copy one state of the source; return None if it lost objects meanwhile."""
        state, there, found = await gather(
            read_references(self._source),
            read_references(self._destination),
            read_if_there(self._destination, contents.MARK),
        )
        if state is None:
            raise FormatError(
                f"There are no references to copy at {self._source.description.url!r}."
            )
        if there is not None and self._is_itself(state, there, found):
            raise InvalidInputError(
                f"{self._url!r} is the repository that is to be copied. Copy to another location."
            )
        mark = Mark.decode(None if found is None else found.data)
        if there is not None and self._is_shown(state, there, mark):
            return self._report(there, there)
        plan = None
        assets = assets_of(self._source, state.spec_version, snapshot_nodes=_CACHED_NODES)
        try:
            # A round: plan what to show; note at the destination that it is about to change; bring
            # the objects; show the references. An end at any point leaves the old state, and a note
            # that the next copy reads.
            plan = await make_plan(assets, state, self._selection, self._derivation)
            await self._begin(state, plan.references, there, found, mark)
            if self._derivation.changes_nothing:
                whole = await self._copy_objects(state, plan, there, mark)
            else:
                whole = await self._derive_objects(assets, state, plan, there, mark)
        except (ObjectNotFoundError, SnapshotNotFoundError, FormatError) as error:
            # Missing in a state that is still shown: it is damaged, and another round would find
            # the same.
            if await self._is_still(state, plan):
                raise
            self.lost = error
            return None
        if not whole:
            return None
        await self._show(plan.references, there)
        return self._report(plan.references, there)

    def _is_itself(self, state: References, there: References, found: Retrieved | None) -> bool:
        """Return whether source and destination are one place.

        Two services can have places of one name. They are told apart by their options, or since
        only a copy has a note of copies.
        """
        ours, theirs = self._source.description, self._destination.description
        if ours.url != theirs.url or state.sums != there.sums:
            return False
        return found is None or ours.options == theirs.options

    def _is_shown(self, state: References, there: References, mark: Mark) -> bool:
        """Return whether the destination shows this state of the source."""
        as_it_is = self._selection.is_whole and self._derivation.changes_nothing
        if as_it_is and there.sums == state.sums:
            return True
        return (
            mark.source == state.sums and mark.selection == self._key and mark.shown == there.sums
        )

    @property
    def _key(self) -> tuple[object, ...]:
        refs = self._selection.refs
        chosen = (None if refs is None else sorted(refs), self._selection.since_us)
        if self._derivation.changes_nothing:
            return chosen
        return (*chosen, self._derivation.describe())

    async def _is_still(self, state: References, plan: Plan | None) -> bool:
        """Return whether the source still shows what it did, so that what is missing was lost.

        Expiration of format version 1 changes no reference: there, look at the history again.
        """
        now = await read_references(self._source)
        if now is None or now.sums != state.sums:
            return False
        if state.spec_version > 1:
            return True
        return plan is not None and (await self._plan(state)).snapshots == plan.snapshots

    async def _plan(self, state: References) -> Plan:
        """Plan anew, from the present files."""
        assets = assets_of(self._source, state.spec_version)
        return await make_plan(assets, state, self._selection, self._derivation)

    def _report(self, shown: References, before: References | None) -> CopyReport:
        done = self._transfer
        changes = () if shown is before else _ref_changes(before, shown)
        return CopyReport(
            done.copied,
            done.bytes_copied,
            done.skipped,
            done.by_service,
            tuple(changes),
            self._discarded,
            None if self._derivation.container is None else self._derivation.container.url_prefix,
        )

    # The destination

    async def _begin(
        self,
        state: References,
        wanted: References,
        there: References | None,
        found: Retrieved | None,
        mark: Mark,
    ) -> None:
        """Refuse a destination that is no copy, and note which state is about to be shown."""
        if there is None and found is None:
            await self._check_empty()
        self._check_origin(found, mark)
        if there is not None:
            await self._check_copy(state, there, found, mark)
        note = Mark(source=state.sums, selection=self._key, refs=self._selection.refs)
        # Before any reference is written: a copy that ends between two of them must not look like a
        # repository that somebody changed.
        data = note.before(there, wanted).encode()
        if found is not None and bytes(found.data) == data:
            return
        expected = ABSENT if found is None else found.version
        try:
            await self._destination.put(contents.MARK, data, if_version=expected)
        except PreconditionFailedError as error:
            raise self._overtaken() from error

    def _check_origin(self, found: Retrieved | None, mark: Mark) -> None:
        """Refuse to mix chunks that are copied with chunks that stay: names would be the same."""
        had, wanted = mark.derivation.get("origin"), self._derivation.describe()["origin"]
        if found is None or not mark.selection or had == wanted:
            return
        kind = f"a shallow copy, whose chunks are at {had!r}" if had else "a copy with all chunks"
        raise RepositoryExistsError(
            f"{self._url!r} was chosen for a copy of {self._source.description.url!r}, and holds "
            f"{kind}. Copy to an empty location.",
            url=self._url,
        )

    async def _check_copy(
        self, state: References, there: References, found: Retrieved | None, mark: Mark
    ) -> None:
        """Raise an error unless what is there is a copy that may be replaced."""
        origin = self._source.description.url
        begin = f"The repository at {self._url!r} cannot be replaced by a copy of {origin!r}: "
        if found is None or not mark.references:
            raise RepositoryExistsError(
                f"{begin}it is no copy, or the note of copies at {contents.MARK!r} was lost. "
                "Copy to an empty location.",
                url=self._url,
            )
        if not await self._has_same_origin(state, there):
            raise RepositoryExistsError(
                f"{begin}it is a copy of another repository, with which it shares no snapshot. "
                "Copy to an empty location.",
                url=self._url,
            )
        changes = changes_since(mark, there)
        if changes and not self.discard_changes:
            more = "" if len(changes) <= _NAMED_AT_MOST else ", and more"
            raise RepositoryExistsError(
                f"{begin}it was changed after the last copy: {'; '.join(changes[:_NAMED_AT_MOST])}"
                f"{more}. Copy to an empty location, or undo these changes and lose what they "
                "brought with discard_changes=True (sync --discard-changes).",
                url=self._url,
                changes=changes,
            )
        if not self._selection.covers(mark.refs) and not self.discard_changes:
            held = "all" if mark.refs is None else ", ".join(sorted(mark.refs))
            raise RepositoryExistsError(
                f"{begin}it holds the branches and tags {held}, and fewer were selected. Select "
                "these as well, copy to an empty location, or drop what was not selected with "
                "discard_changes=True (sync --discard-changes).",
                url=self._url,
            )
        paths = mark.derivation.get("paths")
        if paths != self._derivation.describe()["paths"] and not self.discard_changes:
            held = "all arrays and groups" if paths is None else ", ".join(map(str, paths))
            raise RepositoryExistsError(
                f"{begin}it holds {held}, and others were chosen, so every snapshot would be "
                "another one. Choose the same, copy to an empty location, or replace all of its "
                "history with discard_changes=True (sync --discard-changes).",
                url=self._url,
            )
        if changes:
            self._discarded = tuple(changes)
            if there.spec_version > 1:
                # As every change of a repo info does: what is undone can be found again by hand.
                await self._destination.copy(REPO_INFO, backup_key(new_backup_name(REPO_INFO)))

    async def _has_same_origin(self, state: References, there: References) -> bool:
        """Return whether two repositories have a snapshot in common, which only copies have."""
        if state.spec_version > 1 and there.spec_version > 1:
            # With the time, because every repository begins with a snapshot of the same id.
            known = {(it.id, it.flushed_at) for it in state.info.snapshots.values()}
            return any((it.id, it.flushed_at) in known for it in there.info.snapshots.values())
        key = snapshot_key(INITIAL_SNAPSHOT_ID)
        ours, theirs = await gather(
            read_if_there(self._source, key), read_if_there(self._destination, key)
        )
        return ours is None or theirs is None or bytes(ours.data) == bytes(theirs.data)

    async def _check_empty(self) -> None:
        from icechunk_async.storage.probe import PROBE_PREFIX  # noqa: PLC0415 -- not without need

        entries = self._destination.list_prefix()
        async with closing(entries):
            async for entry in entries:
                if isinstance(entry, ObjectInfo) and entry.key.startswith(PROBE_PREFIX):
                    continue
                found = getattr(entry, "key", entry)
                raise RepositoryExistsError(
                    f"{self._source.description.url!r} cannot be copied to {self._url!r}: "
                    f"{found!r} is there, which no copy put there. Copy to an empty location.",
                    url=self._url,
                )

    def _overtaken(self) -> ConflictError:
        return ConflictError(
            f"Somebody else changed the copy at {self._url!r} meanwhile. "
            "It shows what they wrote. Copy again to bring it up to date."
        )

    # Objects

    async def _copy_objects(
        self, state: References, plan: Plan, there: References | None, mark: Mark
    ) -> bool:
        """Copy what the plan needs; return False if the source lost some of it meanwhile."""
        follows = there is not None and there.spec_version > 1
        # All of it, and nothing there yet: listings are cheaper than reading manifests.
        if plan.snapshots is None or (self._selection.is_whole and not follows):
            whole = await self._copy_listed(state)
            if whole:
                await self._copy_statistics()
            return whole
        known = there.info if there is not None and follows else None
        needs = await self._needs(state, plan, known)
        # After an interruption some of it is there, which only a listing tells.
        listing = (known is None and state.spec_version == 1) or mark.interrupted(there)
        whole = True
        for folder in contents.FOLDERS:
            for ids, needed in (
                (needs.objects.get(folder), True),
                (needs.optional.get(folder), False),
            ):
                if ids is None or not len(ids):
                    continue
                copied = await self._copy_ids(folder, ids, state.spec_version, listing=listing)
                whole = whole and (copied or not needed)
        if whole and self._selection.is_whole and known is not None:
            await self._copy_log(state.info, known, listing=listing or mark.selection != _WHOLE_KEY)
        if not whole:
            return await self._lost(state, plan)
        if self._selection.is_whole and OwnSettings.stored_in(state.info).statistics:
            await self._copy_statistics()
        for key, data in (plan.rewritten or {}).items():
            await self._destination.put(key, data)
            self._transfer.count(len(data))
        return True

    async def _derive_objects(
        self,
        assets: Assets,
        state: References,
        plan: Plan,
        there: References | None,
        mark: Mark,
    ) -> bool:
        """Make what the plan needs; return False if the source lost some of it meanwhile."""
        assert plan.lines is not None
        version = state.spec_version
        follows = there is not None and version == there.spec_version == 2
        known: AbstractSet[SnapshotId] = frozenset()
        if there is not None and follows:
            known = there.info.snapshots.keys()
        work = Deriving(
            assets,
            assets_of(self._destination, version),
            self._transfer,
            self._derivation,
            dictionary=self.dictionary,
            guard=clock.now_us() // 1_000_000 + GUARD_SECONDS,
            progress=self.progress,
        )
        changed = bool(mark.selection) and mark.derivation != self._derivation.describe()
        resumes = changed or mark.interrupted(there) or (there is not None and not follows)
        if not await work.bring(plan.lines, known, resumes=resumes):
            return await self._lost(state, plan)
        if self._derivation.container is None:
            return True
        return await self._has_all(state, plan)  # nothing else looked whether chunks are there

    async def _has_all(self, state: References, plan: Plan) -> bool:
        """Return whether the source still has the snapshots of a plan, so that none was lost."""
        now = await read_references(self._source)
        if now is None or now.spec_version != state.spec_version:
            return False
        if now.spec_version > 1:
            return plan.snapshots is not None and plan.snapshots <= now.info.snapshots.keys()
        again = (await self._plan(now)).snapshots
        return again is not None and plan.snapshots is not None and plan.snapshots <= again

    async def _copy_ids(self, folder: str, ids: IdSet, spec_version: int, *, listing: bool) -> bool:
        if not listing:
            return await self._transfer.by_id(folder, ids)
        again = spec_version == 1 and folder == contents.SNAPSHOTS  # expiration writes them again
        return await self._transfer.by_listing(folder, ids, again=again)

    async def _lost(self, state: References, plan: Plan) -> bool:
        """Return False if the source changed; else it is damaged, and must not be shown."""
        if not await self._is_still(state, plan):
            return False
        raise ObjectNotFoundError(
            f"The repository at {self._source.description.url!r} is damaged: objects that its "
            "history needs are missing. 'icechunk-async check' lists them. The destination "
            f"{self._url!r} shows what it did before."
        )

    async def _needs(self, state: References, plan: Plan, known: RepoInfo | None) -> Needs:
        assert plan.snapshots is not None
        assets = assets_of(self._source, state.spec_version)
        if state.spec_version == 1:
            return await find_needs(
                assets,
                plan.snapshots,
                parents=frozenset(),
                logs=plan.snapshots,
                progress=self.progress,
            )
        infos = plan.references.info.snapshots
        had: AbstractSet[SnapshotId] = known.snapshots.keys() if known is not None else frozenset()
        new = {it for it in infos if it not in had}
        parents = {
            parent for it in new if (parent := infos[it].parent_id) is not None and parent in had
        }
        # Also logs of snapshots that expired since, which the history may newly name.
        logs = _logs(infos) - (_logs(known.snapshots) if known is not None else set())
        return await find_needs(assets, new, parents=parents, logs=logs, progress=self.progress)

    async def _copy_log(self, info: RepoInfo, known: RepoInfo, *, listing: bool) -> None:
        """Copy the backups in which the operations log continues; a lost one ends the log early."""
        names = _new_backups(info, known)
        if names is None or listing:
            await self._transfer.by_listing(contents.LOG)
        else:
            await self._transfer.by_key([backup_key(name) for name in names])

    async def _copy_statistics(self) -> None:
        """Copy statistics of chunks. Some may vanish meanwhile, as analysis joins them."""
        await self._transfer.by_listing(contents.STATISTICS)

    async def _copy_listed(self, state: References) -> bool:
        """Copy all that is there; return False if the source lost some of it meanwhile."""
        whole = True
        for folder in contents.FOLDERS:
            again = state.spec_version == 1 and folder == contents.SNAPSHOTS
            whole = await self._transfer.by_listing(folder, again=again) and whole
        now = await read_references(self._source)
        if now is None:
            return False
        # If the references did not change, an object that vanished was garbage.
        return now.sums == state.sums or (whole and not await self._was_collected(state, now))

    async def _was_collected(self, state: References, now: References) -> bool:
        """Return whether objects of a state may have been collected before they were listed.

        Collection drops snapshots first, from the history and then as files. So as long as the
        history has all snapshots of the state, everything that they refer to was copied.
        """
        if now.spec_version != state.spec_version:
            return True
        if state.spec_version > 1:
            return not state.info.snapshots.keys() <= now.info.snapshots.keys()
        return not await self._has_ancestry(state)

    async def _has_ancestry(self, state: References) -> bool:
        """Return whether all snapshots of a state of format version 1 were copied."""
        walked: set[SnapshotId] = set()
        for _, tip in state.refs.named():
            current: SnapshotId | None = tip
            while current is not None and current not in walked:
                walked.add(current)
                copied = await read_if_there(self._destination, snapshot_key(current))
                if copied is None:
                    return False
                current = decode_snapshot(unpack(copied.data, FileType.SNAPSHOT)).parent_id
        return True

    # References

    async def _show(self, state: References, there: References | None) -> None:
        """Show the new state. Format version 2 has one object, version 1 one for each reference."""
        before = there or await self._begun(state)
        order = sorted(state.objects, key=lambda key: key != CONFIG)  # the configuration first
        for key in order:
            data = state.objects[key]
            if before.objects.get(key) == data:
                continue
            await self._put_reference(key, data, before.versions.get(key))
            self._transfer.count(len(data))
        # Last, so that a reader finds at every moment some state of each branch that stays.
        gone = [key for key in before.objects if key not in state.objects]
        for failure in await self._destination.delete(gone) if gone else []:
            raise failure.error

    async def _begun(self, state: References) -> References:
        """Return the configuration that an interrupted copy wrote before the first reference."""
        found = None
        if state.spec_version == 1:
            found = await read_if_there(self._destination, CONFIG)
        if found is None:
            return References({})
        return References({CONFIG: bytes(found.data)}, {CONFIG: found.version})

    async def _put_reference(self, key: str, data: bytes, expected: Version | None) -> None:
        try:
            await self._destination.put(key, data, if_version=expected or ABSENT)
        except PreconditionFailedError as error:
            raise self._overtaken() from error
        except OutcomeUnknownError:
            found = await read_if_there(self._destination, key)
            # The reply was lost. If what is there is what was written, it landed.
            if found is None or bytes(found.data) != data:
                raise


_WHOLE_KEY: Final = (None, None)


def _logs(infos: Mapping[SnapshotId, SnapshotInfo]) -> set[SnapshotId]:
    """Return the snapshots whose transaction logs a history needs."""
    pruned = {log for it in infos.values() for log in it.pruned_ancestor_logs}
    return pruned | infos.keys()


def _new_backups(info: RepoInfo, known: RepoInfo) -> list[str] | None:
    """Return the backups that were made since an earlier state; None if the log does not tell."""
    if not known.updates:
        return None
    newest = known.updates[0]
    names: list[str] = []
    for it in info.updates:
        if it.backup_path is not None:
            names.append(it.backup_path)
        # Up to the newest entry that the copy has: the backup that it names now is of the state
        # that the copy shows, and was made since.
        if (it.detail, it.updated_at) == (newest.detail, newest.updated_at):
            return names
    return None


def _ref_changes(before: References | None, after: References) -> Iterable[RefChange]:
    old = {} if before is None else dict(before.refs.named())
    new = dict(after.refs.named())
    for kind, name in sorted(old.keys() | new.keys()):
        was, now = old.get((kind, name)), new.get((kind, name))
        if was != now:
            change: _Change = "created" if was is None else "deleted" if now is None else "moved"
            yield RefChange("branch" if kind == "branch" else "tag", name, change, was, now)
