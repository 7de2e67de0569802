"""Looking whether every object is there: nothing is missed, nothing is made up."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from icechunk_async import Repository, RepositoryConfig
from icechunk_async.config import LocalFileSystemStore, VirtualChunkContainer
from icechunk_async.credentials import LocalFileSystemAccess
from icechunk_async.storage import Capabilities, open_storage
from icechunk_async.testing.wrapping import WrappedStorage
from tests.helpers import make_array, memory_url, write
from tests.unit.engine.upkeep.upkeep_tools import littered

if TYPE_CHECKING:
    from pathlib import Path

    from icechunk_async.engine.upkeep.check import ReferenceReport


class Unlisted(WrappedStorage):
    """A storage that cannot list."""

    @property
    def capabilities(self) -> Capabilities:
        """Tell so."""
        return Capabilities(
            writable=False, listing=False, reasons={"listing": "a web server", "writable": "same"}
        )


def problems(report: ReferenceReport) -> set[tuple[str, str, str, int]]:
    """Return the broken references."""
    return {(it.kind, it.location, it.problem, it.references) for it in report.broken}


@pytest.mark.parametrize("spec", [1, 2])
async def test_check_names_each_missing_object(spec: int) -> None:
    """Of every folder; garbage that goes is not missed."""
    url, _ = await littered(spec)
    async with Repository.open(url) as repository, open_storage(url) as storage:
        whole = await repository.check_references()
        assert whole.is_whole
        assert (whole.snapshots, whole.chunk_objects, whole.virtual_objects) == (6, 5, 0)
        keys = [entry.key async for entry in storage.list_prefix("")]  # type: ignore[union-attr]
    found: dict[str, set[str]] = {}
    for key in keys:
        folder = key.partition("/")[0]
        if folder not in ("chunks", "manifests", "transactions", "snapshots"):
            continue
        async with open_storage(url) as storage:
            data = bytes((await storage.get(key)).data)
            await storage.delete([key])
            async with Repository.open(url) as repository:
                report = await repository.check_references()
            await storage.put(key, data)
        named = {it.location for it in report.broken if it.problem == "missing"}
        assert named <= {key}
        found.setdefault(folder, set()).update(named)
    assert {it: len(names) for it, names in found.items()} == {
        "chunks": whole.chunk_objects,
        "manifests": whole.manifests,
        "snapshots": whole.snapshots,
        "transactions": whole.transaction_logs,
    }


@pytest.mark.parametrize("spec", [1, 2])
async def test_check_ignores_caches(spec: int) -> None:
    """A missing manifest is found even if the same handle wrote it and has it in its cache."""
    url = memory_url()
    async with open_storage(url) as storage, Repository.create(url, spec_version=spec) as it:
        session = await it.writable_session("main")
        await make_array(session, "a", (4,), (2,))
        await write(session, "a/c/0", bytes(8))
        await session.commit("a chunk")
        assert (await it.check_references()).is_whole
        (manifest,) = [entry.key async for entry in storage.list_prefix("manifests/")]  # type: ignore[union-attr]
        await storage.delete([manifest])
        assert problems(await it.check_references()) == {("manifest", manifest, "missing", 0)}


async def test_check_names_short_and_damaged_objects() -> None:
    """A chunk object that is too short; files that are no files of the format."""
    url, _ = await littered(2)
    async with open_storage(url) as storage, Repository.open(url) as repository:
        needed = await repository.check_references()
        assert needed.is_whole
        names = {"chunks": 0, "manifests": 0}
        for folder in names:
            async for entry in storage.list_prefix(f"{folder}/"):
                await storage.put(entry.key, b"short")  # type: ignore[union-attr]
        report = await repository.check_references()
    kinds = {(it.kind, it.problem) for it in report.broken}
    assert kinds == {("manifest", "unreadable")}
    assert len(report.broken) == needed.manifests


async def test_check_works_without_listing() -> None:
    """The answer is the same."""
    url, _ = await littered(2)
    async with open_storage(url) as storage:
        async with Repository.open(url) as repository:
            expected = await repository.check_references()
        async with Repository.open(Unlisted(storage)) as repository:
            assert await repository.check_references() == expected
            for key in [entry.key async for entry in storage.list_prefix("chunks/")]:  # type: ignore[union-attr]
                await storage.delete([key])
            report = await repository.check_references()
    assert len(report.broken) == expected.chunk_objects


async def test_virtual_objects_are_compared_with_their_guards(tmp_path: Path) -> None:
    """Gone, shorter than needed, or changed; without access they are counted."""
    prefix = f"{tmp_path.as_uri()}/"
    container = VirtualChunkContainer(prefix, LocalFileSystemStore(str(tmp_path)))
    config = RepositoryConfig(virtual_chunk_containers=(container,))
    access = {prefix: LocalFileSystemAccess()}
    for name in ("fine", "gone", "short", "changed"):
        (tmp_path / name).write_bytes(bytes(100))
    url = (tmp_path / "repo").as_uri()
    create = Repository.create(url, config=config, authorize_virtual_chunk_access=access)
    async with create as repository:
        session = await repository.writable_session("main")
        await make_array(session, "a", (5,), (1,))
        for place, name in enumerate(("fine", "gone", "short", "changed", "fine")):
            session.store.set_virtual_ref(
                f"a/c/{place}",
                f"{prefix}{name}",
                offset=50,
                length=50,
                checksum="another" if name == "changed" else None,
            )
        await session.commit("virtual")
        assert problems(await repository.check_references()) == {
            ("virtual", f"{prefix}changed", "changed", 1)
        }
        (tmp_path / "gone").unlink()
        (tmp_path / "short").write_bytes(bytes(99))
        report = await repository.check_references()
        assert problems(report) == {
            ("virtual", f"{prefix}changed", "changed", 1),
            ("virtual", f"{prefix}gone", "missing", 1),
            ("virtual", f"{prefix}short", "too short", 1),
        }
    async with Repository.open(url) as repository:
        report = await repository.check_references()
        assert (report.virtual_objects, report.virtual_not_authorized) == (4, 4)
        assert report.is_whole
