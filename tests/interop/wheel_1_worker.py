"""The official wheel 1.x as a process: requests come in and answers go out as lines of JSON.

Runs on Python 3.11 in a separate environment, so it cannot import our engine.
"""

from __future__ import annotations

import asyncio
import base64
import hashlib
import json
import sys
import warnings
from datetime import UTC, datetime, timedelta
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

import icechunk
import zarr

from tests.interop.edits import Sources, apply, contents, loads, read_arrays

if TYPE_CHECKING:
    from collections.abc import Mapping

ic: Any = icechunk  # of another version than the one that types are checked against


def _open(root: str, source: str | None) -> Any:
    access = None if source is None else ic.containers_credentials({f"file://{source}/": None})
    storage = ic.local_filesystem_storage(root)
    return ic.Repository.open(storage, authorize_virtual_chunk_access=access)


async def create(root: str, inline: int | None, split: int | None, source: str | None) -> str:
    """Create a repository; ``split`` is the number of chunks per axis and manifest."""
    config = ic.RepositoryConfig(inline_chunk_threshold_bytes=inline)
    if split is not None:
        sizes = {ic.ManifestSplitCondition.AnyArray(): {ic.ManifestSplitDimCondition.Any(): split}}
        splitting = ic.ManifestSplittingConfig.from_dict(sizes)
        config.manifest = ic.ManifestConfig(splitting=splitting)
    if source is not None:
        store = ic.local_filesystem_store(source)
        container = ic.VirtualChunkContainer(f"file://{source}/", store)
        config.set_virtual_chunk_container(container)
    ic.Repository.create(ic.local_filesystem_storage(root), config)
    return str(ic.__version__)


async def commit(
    root: str, source: str | None, edits: str, branch: str, metadata: Mapping[str, Any]
) -> str:
    """Apply edits to a branch and commit them; where they change nothing, answer the tip."""
    session = _open(root, source).writable_session(branch)
    sources = None if source is None else Sources(Path(source), f"file://{source}/")
    await apply(session.store, loads(edits), sources)
    if not session.has_uncommitted_changes:
        return str(session.snapshot_id)
    return str(session.commit("by wheel 1", dict(metadata)))


async def refs(root: str, do: str, name: str, snapshot: str | None = None) -> None:
    """Call one of the repository's methods for branches and tags."""
    arguments = [name] if snapshot is None else [name, snapshot]
    getattr(_open(root, None), do)(*arguments)


async def expire(root: str, before: str) -> list[str]:
    """Expire what is older than a snapshot."""
    repository = _open(root, None)
    older_than = repository.lookup_snapshot(before).written_at
    return sorted(repository.expire_snapshots(older_than=older_than))


async def collect(root: str, *, dry_run: bool) -> dict[str, int]:
    """Collect garbage with a cutoff in the future."""
    tomorrow = datetime.now(UTC) + timedelta(days=1)
    summary = _open(root, None).garbage_collect(tomorrow, dry_run=dry_run)
    return {
        "snapshots": summary.snapshots_deleted,
        "transactions": summary.transaction_logs_deleted,
        "manifests": summary.manifests_deleted,
        "chunks": summary.chunks_deleted,
        "bytes": summary.bytes_deleted,
    }


async def view(root: str, source: str | None) -> dict[str, Any]:
    """Return branches, tags, ancestries, diffs, and every key of every snapshot."""
    repository = _open(root, source)
    seen: dict[str, Any] = {
        "branches": {name: repository.lookup_branch(name) for name in repository.list_branches()},
        "tags": {name: repository.lookup_tag(name) for name in repository.list_tags()},
        "ancestries": {},
        "diffs": {},
        "contents": {},
        "arrays": {},
    }
    for tip in sorted({*seen["branches"].values(), *seen["tags"].values()}):
        line = list(repository.ancestry(snapshot_id=tip))
        seen["ancestries"][tip] = [
            [
                info.id,
                info.parent_id,
                info.written_at.isoformat(),
                info.message,
                json.dumps(dict(info.metadata), sort_keys=True),
            ]
            for info in line
        ]
        for child, parent in pairwise(line):
            diff = repository.diff(from_snapshot_id=parent.id, to_snapshot_id=child.id)
            seen["diffs"][f"{parent.id} {child.id}"] = _diff(diff)
        for info in line:
            store = repository.readonly_session(snapshot_id=info.id).store
            keys = await contents(store)
            seen["contents"][info.id] = {
                key: base64.b64encode(value).decode() for key, value in keys.items()
            }
            arrays = await read_arrays(store, unknown=(TypeError, ValueError, KeyError))
            seen["arrays"][info.id] = {
                path: [*row[:3], hashlib.sha256(row[3]).hexdigest()] for path, row in arrays.items()
            }
    return seen


def _diff(diff: Any) -> dict[str, Any]:
    lists = ("new", "deleted", "updated")
    names = [f"{what}_{kind}" for what in lists for kind in ("groups", "arrays")]
    chunks = {path: sorted(map(list, rows)) for path, rows in diff.updated_chunks.items()}
    return {**{name: sorted(getattr(diff, name)) for name in names}, "chunks": chunks}


ACTIONS: dict[str, Any] = {
    "create": create,
    "commit": commit,
    "refs": refs,
    "expire": expire,
    "collect": collect,
    "view": view,
}


def main() -> None:
    """Return requests until there are no more."""
    warnings.simplefilter("ignore")
    zarr.config.set({"threading.max_workers": 2})
    for line in sys.stdin:
        name, options = json.loads(line)
        try:
            answer = {"value": asyncio.run(ACTIONS[name](**options))}
        except Exception as error:  # noqa: BLE001 - goes to the test, in words
            answer = {"error": f"{type(error).__name__}: {error}"}
        sys.stdout.write(json.dumps(answer) + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
