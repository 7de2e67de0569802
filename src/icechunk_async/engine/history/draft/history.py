"""The history of the first draft: branches, tags and ancestry are in the state file."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Final

from icechunk_async._runtime import clock
from icechunk_async.engine.history.draft.layout import DraftLayout, has_parquet, load_parquet
from icechunk_async.engine.history.draft.state_file import Seen, StateFile, read_state
from icechunk_async.engine.history.outcomes import create_object, read_if_there
from icechunk_async.engine.history.protocol import (
    MAIN,
    SAFE_UPDATES,
    Amend,
    Audit,
    Capabilities,
    Commit,
    Detach,
    Fault,
    StoredConfig,
)
from icechunk_async.engine.history.refusals import (
    being_migrated,
    branch_exists,
    branch_moved,
    branch_not_reset,
    config_changed,
    no_branch,
    no_snapshot,
    no_snapshot_yet,
    no_tag,
    refuse_main,
    repository_exists,
    tag_exists,
)
from icechunk_async.engine.history.way import Found, Way
from icechunk_async.engine.virtual.elsewhere import Elsewhere
from icechunk_async.errors import FormatError, InvalidRefNameError
from icechunk_async.format.config.codec import decode_config, encode_config
from icechunk_async.format.draft.names import ATTRIBUTES, CHUNKS, MANIFESTS, STATE, STRUCTURES
from icechunk_async.format.draft.state import Ref, State, encode_state, new_entry
from icechunk_async.format.json.values import check_text

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable
    from collections.abc import Set as AbstractSet
    from datetime import datetime

    from icechunk_async.engine.files.assets import Assets
    from icechunk_async.engine.history.collections import Guard
    from icechunk_async.engine.history.protocol import Expiration, Kept, ParentOf, Publication
    from icechunk_async.engine.history.way import Creating, HistorySettings
    from icechunk_async.format.config import RepositoryConfig
    from icechunk_async.format.ids import SnapshotId
    from icechunk_async.format.repo_info import SnapshotInfo
    from icechunk_async.storage import Storage

__all__ = ["DRAFT_WAY", "DraftHistory"]

_NAME: Final = "first-draft"
_FOLDERS: Final = (CHUNKS, MANIFESTS, ATTRIBUTES, STRUCTURES, STATE)
"""The state file last: it shows that there was a repository."""
_CAPABILITIES: Final = Capabilities(
    "the first draft's layout",
    "Format version 2 has: migrate the repository with icechunk_async.upkeep.upgrade.",
)
_ID_BYTES: Final = 16
_MAX_NAME: Final = 1024


class DraftHistory:
    """A `History` of the first draft."""

    layout = _NAME
    spec_version = 0
    capabilities = _CAPABILITIES
    storage_needs = SAFE_UPDATES
    state = None

    def __init__(
        self, storage: Storage, layout: DraftLayout, seen: Seen, settings: HistorySettings
    ) -> None:
        """Read and write the state file of ``storage``; ``seen`` was just read or written."""
        self._storage = storage
        self._file = StateFile(storage, seen, settings)
        layout.catalog.follow(lambda: self._file.seen.state)
        self.migration = _Migration(self._file, layout.root)

    async def branches(self) -> dict[str, SnapshotId]:
        """Return every branch and its tip. Cost: one conditional request."""
        return (await self._state()).of_kind("branch")

    async def tags(self) -> dict[str, SnapshotId]:
        """Return every tag. Cost: one conditional request."""
        return (await self._state()).of_kind("tag")

    async def branch_tip(self, name: str) -> SnapshotId:
        """Return the tip of a branch. Cost: one conditional request."""
        return _tip(await self._state(), name)

    async def tip_at(self, name: str, moment_us: int) -> SnapshotId:
        """Return the newest ancestor of a branch from before a time.

        The state file does not say where a branch was before. Cost: one conditional request.
        """
        state = await self._state()
        first: SnapshotInfo | None = None
        # The newest first, so that the loop ends with the first snapshot if all are younger.
        for first in _ancestry(state, _tip(state, name)):
            if first.flushed_at <= moment_us:
                return first.id
        raise no_snapshot_yet(moment_us, first)

    async def tag_target(self, name: str) -> SnapshotId:
        """Return the snapshot of a tag. Cost: one conditional request."""
        tags = (await self._state()).of_kind("tag")
        if name not in tags:
            raise no_tag(name, tags)
        return tags[name]

    def last_seen(self, branch: str | None, tag: str | None) -> SnapshotId | None:
        """Return where a branch or tag was in the newest state seen."""
        kind, name = ("tag", tag) if tag is not None else ("branch", branch)
        return self._file.seen.state.of_kind(kind).get(name or "")

    async def create_branch(self, name: str, snapshot_id: SnapshotId) -> None:
        """Create a branch. No tag may have its name: the state file has one list of both."""
        await self._create_ref(name, Ref("branch", snapshot_id))

    async def reset_branch(
        self,
        name: str,
        snapshot_id: SnapshotId,
        *,
        expected: SnapshotId | None = None,
        approved: frozenset[str] | None = None,
    ) -> None:
        """Move a branch to another snapshot."""
        del approved  # no branch is protected

        def edit(state: State) -> State:
            tip = _tip(state, name)
            if expected is not None and tip != expected:
                raise branch_not_reset(name, expected, tip)
            _check_snapshot(state, snapshot_id)
            return state.with_ref(name, Ref("branch", snapshot_id))

        await self._update(edit)

    async def delete_branch(self, name: str) -> None:
        """Delete a branch; its snapshots stay in the state file."""

        def edit(state: State) -> State:
            _tip(state, name)
            return state.without_ref(name)

        refuse_main(name)
        await self._update(edit)

    async def create_tag(self, name: str, snapshot_id: SnapshotId) -> None:
        """Create a tag. No branch may have its name: the state file has one list of both."""
        await self._create_ref(name, Ref("tag", snapshot_id))

    async def delete_tag(self, name: str) -> None:
        """Refuse: nothing would keep the name from being used again."""
        del name
        self.capabilities.require("tag_deletion")

    async def snapshot_info(self, snapshot_id: SnapshotId) -> SnapshotInfo:
        """Return a snapshot's place in history. Cost: none, or one conditional request."""
        found = self.known_snapshot(snapshot_id)
        if found is None:
            entry = (await self._state()).snapshots.get(snapshot_id)
            if entry is None:
                raise no_snapshot(snapshot_id)
            found = entry.info
        return found

    def known_snapshot(self, snapshot_id: SnapshotId) -> SnapshotInfo | None:
        """Return a snapshot's place in history if it was seen before; from any thread."""
        entry = self._file.seen.state.snapshots.get(snapshot_id)
        return None if entry is None else entry.info

    async def ancestry_pages(self, snapshot_id: SnapshotId) -> AsyncIterator[list[SnapshotInfo]]:
        """Return all of `ancestry` at once."""
        yield [info async for info in self.ancestry(snapshot_id)]

    async def ancestry(self, snapshot_id: SnapshotId) -> AsyncIterator[SnapshotInfo]:
        """Iterate from a snapshot to its root. Cost: none, or one conditional request."""
        state = self._file.seen.state
        if snapshot_id not in state.snapshots:
            state = await self._state()  # which may be older, if a copy took the place of all
            _check_snapshot(state, snapshot_id)
        for info in _ancestry(state, snapshot_id):
            yield info

    def log_position(self) -> int:
        """Return 0: there is no operations log."""
        return 0

    async def publish(
        self, publication: Publication, store: Callable[[], Awaitable[None]], guard: Guard
    ) -> None:
        """Store a snapshot's files, then put it into the state file.

        No garbage is ever collected in this layout, so the guard is not asked.
        """
        del guard
        if isinstance(publication, Amend):
            self.capabilities.require("amend")
            return
        snapshot, parent_id = publication.snapshot, publication.parent_id

        def edit(state: State) -> State:
            parent = state.snapshots.get(parent_id)
            if parent is None:
                raise no_snapshot(parent_id)
            # Snapshots of all branches are in the state file, so that one written state shows the
            # new one with all that it needs.
            state = state.with_entry(new_entry(snapshot, parent))
            if isinstance(publication, Detach):
                return state
            branch = publication.branch
            tip = state.of_kind("branch").get(branch)
            if tip != parent_id:
                raise branch_moved(branch, parent_id, tip)
            return state.with_ref(branch, Ref("branch", snapshot.id))

        seen = self._file.seen.state
        if isinstance(publication, Commit):
            # If the newest state that was seen fits, it is written against without reading it
            # again.
            from_seen = seen.of_kind("branch").get(publication.branch) == parent_id
        else:
            from_seen = parent_id in seen.snapshots
        await self._update(edit, store=store, from_seen=from_seen)

    async def load_config(self) -> StoredConfig:
        """Return the configuration in the newest state seen. Cost: none."""
        text = self._file.seen.state.config
        return StoredConfig(_config_of(self._file.seen.state), text)

    async def save_config(self, config: RepositoryConfig, replacing: StoredConfig) -> None:
        """Store a configuration in the state file."""
        text = encode_config(config, 1).decode()

        def edit(state: State) -> State:
            # Compared as stored text: whatever differs was written by somebody else since it was
            # read.
            if state.config != replacing.state:
                raise config_changed()
            return state.with_config(text)

        await self._update(edit)

    async def expire(self, rule: Expiration, *, dry_run: bool) -> frozenset[SnapshotId]:
        """Refuse: the specification does not say how."""
        del rule, dry_run
        self.capabilities.require("expiration")
        return frozenset()

    async def audit(self) -> Audit:
        """Read the state file anew. Cost: one request."""
        retrieved = await read_if_there(self._storage, STATE)
        if retrieved is None:
            return Audit({}, None, (Fault("repo", STATE, "missing", f"{STATE!r} is missing."),))
        try:
            state = read_state(retrieved).state
            # Only to find circles: that each parent is there follows from decoding.
            for tip in {ref.target for ref in state.refs.values()}:
                for _ in _ancestry(state, tip):
                    pass
        except FormatError as error:
            return Audit({}, None, (Fault("repo", STATE, "unreadable", f"{STATE!r}: {error}"),))
        found = {f"{ref.kind}.{name}": ref.target for name, ref in state.refs.items()}
        return Audit(found, {key: it.info for key, it in state.snapshots.items()})

    async def reachable(self, parent_of: ParentOf) -> frozenset[SnapshotId]:
        """Refuse: no garbage is collected in this layout."""
        del parent_of
        self.capabilities.require("upkeep")
        return frozenset()

    async def release(
        self, old: AbstractSet[SnapshotId], parent_of: ParentOf, *, cutoff: datetime | None
    ) -> Kept:
        """Refuse: no garbage is collected in this layout."""
        del old, parent_of, cutoff
        self.capabilities.require("upkeep")
        raise AssertionError("the layout has no upkeep")

    async def _create_ref(self, name: str, ref: Ref) -> None:
        def edit(state: State) -> State:
            _check_snapshot(state, ref.target)
            there = state.refs.get(name)
            if there is not None and there.kind != ref.kind:
                raise _name_taken(name, ref.kind, there.kind)
            if there is not None:
                raise branch_exists(name) if ref.kind == "branch" else tag_exists(name)
            return state.with_ref(name, ref)

        _check_name(name)
        await self._update(edit)

    async def _state(self) -> State:
        return (await self._file.refresh()).state

    async def _update(
        self,
        edit: Callable[[State], State],
        *,
        store: Callable[[], Awaitable[None]] | None = None,
        from_seen: bool = False,
    ) -> None:
        """Change the state, unless it is being migrated; as `StateFile.update`."""

        def checked(state: State) -> State:
            if state.is_migrated:
                raise being_migrated()
            return edit(state)

        await self._file.update(checked, store=store, from_seen=from_seen)


def _tip(state: State, name: str) -> SnapshotId:
    branches = state.of_kind("branch")
    if name not in branches:
        raise no_branch(name, branches)
    return branches[name]


def _ancestry(state: State, snapshot_id: SnapshotId) -> list[SnapshotInfo]:
    """Return a snapshot and its ancestors, newest first.

    Raises:
        FormatError: they form a circle.
    """
    infos: dict[SnapshotId, SnapshotInfo] = {}
    current: SnapshotId | None = snapshot_id
    while current is not None:
        if current in infos:
            raise FormatError(f"The ancestry of snapshot {snapshot_id} forms a circle.")
        infos[current] = state.snapshots[current].info
        current = infos[current].parent_id
    return list(infos.values())


def _check_snapshot(state: State, snapshot_id: SnapshotId) -> None:
    if snapshot_id not in state.snapshots:
        raise no_snapshot(snapshot_id)


def _check_name(name: str) -> None:
    check_text(name, "The name of a reference")
    if not 0 < len(name) <= _MAX_NAME or not name.isprintable():
        raise InvalidRefNameError(
            f"{name!r:.100} cannot name a branch or tag: use 1 to {_MAX_NAME} printable "
            "characters.",
            name=name,
        )


def _name_taken(name: str, wanted: str, other: str) -> InvalidRefNameError:
    return InvalidRefNameError(
        f"There is a {other} {name!r}, and the first draft has one list of branches and tags, so "
        f"no {wanted} can have its name. Choose another name.",
        name=name,
    )


class _Migration:
    """Freezes the repository by a member of the state file that says so."""

    def __init__(self, file: StateFile, root: str) -> None:
        self._file = file
        self.folders = tuple(it if it == STATE else f"{root}{it}" for it in _FOLDERS)

    async def is_frozen(self) -> bool:
        return (await self._file.refresh()).state.is_migrated

    async def freeze(self) -> None:
        await self._set(frozen=True)

    async def thaw(self) -> None:
        await self._set(frozen=False)

    async def _set(self, *, frozen: bool) -> None:
        if (await self._file.refresh()).state.is_migrated != frozen:
            await self._file.update(lambda state: state.frozen(frozen))


def _config_of(state: State) -> RepositoryConfig | None:
    return None if state.config is None else decode_config(state.config.encode(), 1)


async def _detect(storage: Storage) -> Callable[[], Found] | None:
    retrieved = await read_if_there(storage, STATE)
    if retrieved is None:
        return None
    if has_parquet():  # else opening says so
        await load_parquet()

    def read() -> Found:
        seen = read_state(retrieved)
        root, elsewhere = _root_of(seen.state, storage.description.url)
        return replace(_found(seen, DraftLayout(root)), elsewhere=elsewhere)

    return read


def _root_of(state: State, url: str) -> tuple[str, Elsewhere | None]:
    """Return the beginning of the keys of all files but the state file, and their other place.

    Raises:
        FormatError: they are outside of the location, at no URL.
    """
    root = (state.store_root or "").rstrip("/")
    base = url.rstrip("/")
    if root in {"", ".", base}:
        return "", None
    below = root.removeprefix(f"{base}/")
    if "://" in below:
        return "", Elsewhere(below, (CHUNKS, MANIFESTS, ATTRIBUTES, STRUCTURES))
    # The state file is untrusted: it must not make a reader open files outside of the location that
    # was named.
    if below.startswith("/") or ".." in below.split("/"):
        raise FormatError(
            f"{STATE!r} at {url!r} says that the files of the repository are at "
            f"{state.store_root!r:.200}, which is neither below it nor a URL. Correct "
            "'store_root', or copy the files to where the state file is, and remove it."
        )
    return f"{below.removeprefix('./')}/", None


def _found(seen: Seen, layout: DraftLayout) -> Found:
    return Found(_NAME, layout, _config_of(seen.state), partial(_open, seen, layout))


def _open(
    seen: Seen, layout: DraftLayout, storage: Storage, assets: Assets, settings: HistorySettings
) -> DraftHistory:
    del assets  # they have the same layout
    return DraftHistory(storage, layout, seen, settings)


async def _create(new: Creating) -> Found:
    layout = new.assets.layout
    assert isinstance(layout, DraftLayout)  # `DRAFT_WAY` made it
    await load_parquet()
    # Before the state file, which makes the repository.
    await new.assets.put_snapshot(new.snapshot)
    entry = new_entry(new.snapshot, None)
    snapshot_id = entry.info.id
    config = None if new.config is None else encode_config(new.config, 1).decode()
    state = State(
        clock.random_bytes(_ID_BYTES).hex(),
        1,
        {snapshot_id: entry},
        {MAIN: Ref("branch", snapshot_id)},
        config=config,
    )
    version = await create_object(new.storage, STATE, encode_state(state))
    if version is None:
        raise repository_exists(new.storage, repr(STATE))
    return _found(Seen(state, version), layout)


DRAFT_WAY: Final = Way(_NAME, 0, DraftLayout, SAFE_UPDATES, STATE, _detect, _create, _FOLDERS)
