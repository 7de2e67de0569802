"""Make a golden repository with whatever release of ``icechunk`` is installed.

Usage: ``python tests/interop/golden/make.py`` in an environment with that release and ``zarr``.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
from pathlib import Path
from typing import Any

import icechunk
import numpy as np
import zarr
from zarr.core.buffer import default_buffer_prototype

ic: Any = icechunk  # of another release than the one that types are checked against


def main() -> None:
    """Write the repository, and beside it what the release says that it holds."""
    version = ic.__version__
    root = Path(__file__).parent / f"by-{version}"
    config = ic.RepositoryConfig(inline_chunk_threshold_bytes=24)
    repository = ic.Repository.create(ic.local_filesystem_storage(str(root)), config)

    session = repository.writable_session("main")
    group = zarr.open_group(session.store, mode="a", attributes={"made by": version})
    data = np.arange(24, dtype="<i4").reshape(6, 4)
    names = ["y", None]
    array = group.create_array(
        "g/a", shape=(6, 4), chunks=(2, 2), dtype="<i4", dimension_names=names
    )
    array[:] = data
    other = "g-x" if int(version[0]) >= 2 else "x"  # release 0.2.12 loses what sorts before "g/"
    group.create_array(other, shape=(1,), chunks=(1,), dtype="<f8")[:] = 2.5
    group.create_array("größe", shape=(9,), chunks=(4,), dtype="bool")[2:7] = True
    first = session.commit("first", {"one": 1, "nested": {"list": [1, 2.5, None, "é"]}})

    session = repository.writable_session("main")
    zarr.open_array(session.store, path="g/a", mode="r+")[1:5, 1:3] = -1
    session.commit("second")

    session = repository.writable_session("main")
    array = zarr.open_array(session.store, path="g/a", mode="r+")
    array.resize((3, 4))
    array.resize((8, 4))
    del zarr.open_group(session.store, mode="a")[other]
    session.commit("third")
    repository.create_branch("side", first)
    repository.create_tag("v1", first)
    repository.create_tag("v0", first)
    repository.delete_tag("v0")
    if int(version[0]) >= 2:
        _second_format(repository)
    text = json.dumps(_expected(repository), indent=1, ensure_ascii=False) + "\n"
    (root / "expected.json").write_text(text, encoding="utf-8")


def _second_format(repository: Any) -> None:
    """Use the features that only spec 2 has."""
    session = repository.writable_session("main")
    zarr.open_array(session.store, path="g/a", mode="r+")[0, 0] = 77
    session.amend("amended")
    session = repository.writable_session("side")
    zarr.open_group(session.store, mode="a").create_group("forked")
    forked = session.fork()
    zarr.open_array(forked.store, path="g/a", mode="r+")[0, 1] = 78
    session.merge(forked)
    session.commit("merged")
    session = repository.rearrange_session("main")
    session.move("/g", "/moved")
    session.commit("moved")


def _expected(repository: Any) -> dict[str, Any]:
    snapshots: dict[str, Any] = {}
    for branch in sorted(repository.list_branches()):
        for info in repository.ancestry(branch=branch):
            store = repository.readonly_session(snapshot_id=info.id).store
            snapshots[info.id] = {
                "parent": info.parent_id,
                "message": info.message,
                "metadata": dict(info.metadata),
                "contents": asyncio.run(_contents(store)),
            }
    branches = {name: repository.lookup_branch(name) for name in sorted(repository.list_branches())}
    tags = {name: repository.lookup_tag(name) for name in sorted(repository.list_tags())}
    return {"branches": branches, "tags": tags, "snapshots": snapshots}


async def _contents(store: Any) -> dict[str, str]:
    """Return the beginning of the SHA-256 of every value."""
    found = {}
    for key in sorted([key async for key in store.list()]):
        value = await store.get(key, default_buffer_prototype())
        if value is not None:  # release 0.2.12 also lists chunks of what was deleted
            found[key] = hashlib.sha256(value.to_bytes()).hexdigest()[:16]
    return found


if __name__ == "__main__":
    main()
