"""Rules for archives that grow: which length they have, and what is stored."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

import pytest
import zarr.api.asynchronous as zarr

from icechunk_async import Repository, RepositoryConfig
from icechunk_async.config import (
    ManifestConfig,
    ManifestSplitCondition,
    ManifestSplitDimCondition,
    ManifestSplittingConfig,
)
from icechunk_async.engine.commit.shared import length_for_appends
from icechunk_async.errors import BranchNotFoundError, InvalidInputError
from icechunk_async.format.snapshot import ArrayData, Dimension
from icechunk_async.storage import open_storage
from tests.helpers import memory_url, write

if TYPE_CHECKING:
    from collections.abc import Sequence

TIME = ManifestSplitDimCondition.DimensionName("^time$")
X = ManifestSplitDimCondition.DimensionName("x")
EVERYWHERE = ManifestSplitCondition.any_array()
CHUNK = b"x" * 600


def array(*sizes: int, names: Sequence[str | None] | None = ("time", "y", "x")) -> ArrayData:
    """Return an array with a number of chunks along each axis."""
    dimensions = tuple(Dimension(size, size) for size in sizes)
    return ArrayData(dimensions, None if names is None else tuple(names[: len(sizes)]))


@pytest.mark.parametrize(
    ("arrays", "length"),
    [
        ([array(0)], 100),
        ([array(5, 1, 1)], 100),
        ([array(5, 0, 1)], 100),
        ([array(5, 2, 3)], 16),
        ([array(5)] * 142, 14),
        ([array(5)] * 5000, 1),
        ([array(5), array(5, 10, 20), array(5, names=("other",))], 10),
        ([array(5, 100, 100)], 1),
        ([array(5, names=("other",)), array(5, names=None), array(names=())], None),
    ],
)
def test_the_length_bounds_references_of_a_share_and_of_last_cells(
    arrays: list[ArrayData], length: int | None
) -> None:
    """At most 100 references of each share, and all last cells together are some 2,000."""
    assert length_for_appends(arrays, "time") == length


async def planted(repository: Repository) -> None:
    """Commit two arrays that grow along time."""
    session = await repository.writable_session("main")
    for name in ("a", "b"):
        await zarr.create_array(
            session.store,
            name=name,
            shape=(250,),
            chunks=(1,),
            dtype="u1",
            dimension_names=["time"],
            filters=None,
            compressors=None,
        )
        for chunk in range(250):
            await write(session, f"{name}/c/{chunk}", CHUNK)
    await session.commit("planted")


@pytest.mark.parametrize("spec", [1, 2])
async def test_the_rule_is_stored_before_the_others(spec: int) -> None:
    """Once, however often it is asked for; what else is stored stays, and nothing else is."""
    other = (ManifestSplitCondition.name_matches("a"), ((X, 3), (TIME, 4)))
    stored = RepositoryConfig(
        inline_chunk_threshold_bytes=7,
        manifest=ManifestConfig(splitting=ManifestSplittingConfig((other,))),
    )
    async with open_storage(memory_url()) as plain:
        async with Repository.create(plain, config=stored, spec_version=spec) as repository:
            await planted(repository)
        given = RepositoryConfig(num_updates_per_repo_info_file=9)
        async with Repository.open(plain, config=given) as repository:
            assert await repository.split_appends("time") == 100
            assert await repository.split_appends("time") == 100
        found = await Repository.fetch_config(plain)
    assert found is not None
    assert found.manifest is not None
    assert found.manifest.splitting == ManifestSplittingConfig(
        ((EVERYWHERE, ((TIME, 100),)), other)
    )
    assert found.inline_chunk_threshold_bytes == 7
    assert found.num_updates_per_repo_info_file != 9


async def test_the_next_commits_write_the_last_cells() -> None:
    """The first one that changes an array divides it."""
    async with open_storage(memory_url()) as plain:
        async with Repository.create(plain) as repository:
            await planted(repository)
            await repository.split_appends("time")
        async with Repository.open(plain) as repository:
            manifests = []
            for chunk in (249, 248):
                session = await repository.writable_session("main")
                await write(session, f"a/c/{chunk}", CHUNK)
                await session.commit("change")
                base = (await repository.readonly_session("main")).workspace.base
                manifests.append(base.manifests.keys())
                node = base.nodes["/a"].array
                assert node is not None
                assert Counter(it.extents for it in node.manifests) == Counter(
                    [((0, 100),), ((100, 200),), ((200, 250),)]
                )
            assert len(manifests[0] & manifests[1]) == len(manifests[0]) - 1
            assert (await repository.verify("length")).is_healthy


async def test_a_name_is_taken_literally() -> None:
    """Characters of expressions mean themselves."""
    async with Repository.create(memory_url()) as repository:
        session = await repository.writable_session("main")
        for name in ("t.(m", "time", "t.(m2"):
            await zarr.create_array(
                session.store, name=name, shape=(1,), dtype="u1", dimension_names=[name]
            )
        await session.commit("arrays")
        await repository.split_appends("t.(m")
        config = await repository.engine.history.load_config()
        assert config.config is not None
        assert config.config.manifest is not None
        splitting = config.config.manifest.splitting
        assert splitting is not None
        ((_, ((condition, _),)),) = splitting.effective_split_sizes
        matching = [it for it in ("t.(m", "time", "t.(m2", "at.(m") if condition.matches(0, it)]
        assert matching == ["t.(m"]


async def test_an_unknown_dimension_or_branch_stores_nothing() -> None:
    """The error says what to give."""
    async with Repository.create(memory_url()) as repository:
        await planted(repository)
        with pytest.raises(InvalidInputError, match="dimension_names"):
            await repository.split_appends("tim")
        with pytest.raises(BranchNotFoundError):
            await repository.split_appends("time", branch="none")
        assert (await repository.engine.history.load_config()).config is None
