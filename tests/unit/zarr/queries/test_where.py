"""Cells that fulfil conditions: the chunks that may have some, and masks of them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from icechunk_async import Repository
from icechunk_async.errors import InvalidInputError, NodeNotFoundError
from icechunk_async.storage import open_storage
from icechunk_async.sync import Repository as BlockingRepository
from icechunk_async.testing.latency import LatencyStorage
from tests.helpers import memory_url
from tests.unit.zarr.queries.test_aggregate import NO_INLINE, field
from tests.unit.zarr.queries.truth import commit_array

if TYPE_CHECKING:
    from pathlib import Path

    import numpy.typing as npt

    from icechunk_async.results import Selection


async def whole_mask(selection: Selection) -> npt.NDArray[np.bool_]:
    """Return the mask of the whole array."""
    mask = np.zeros(selection.shape, bool)
    async for cells in selection:
        assert len(cells) > 0
        mask[cells.box] = cells.mask
        assert mask[tuple(cells.indices().T)].all()
    return mask


@pytest.mark.parametrize("where", ["t > 280", "t > 280 and lat > 60", "lon in (3, 4)", "t < 0"])
@pytest.mark.parametrize("region", [None, (slice(5, 75), slice(12, 18))])
async def test_masks_are_those_of_numpy(where: str, region: Any) -> None:
    """With and without statistics, in all of the array and in a region."""
    async with Repository.create(memory_url(), config=NO_INLINE) as repository:
        t = await field(repository)
        lat, lon = np.linspace(-90, 90, 100)[:, None], np.arange(100.0)[None, :]
        inside = np.zeros(t.shape, bool)
        inside[region or ()] = True
        wanted = {
            "t > 280": t > 280,
            "t > 280 and lat > 60": (t > 280) & (lat > 60),
            "lon in (3, 4)": np.isin(lon, (3, 4)) & inside,
            "t < 0": t < 0,
        }[where]
        if where.startswith("lon"):
            where += " and t > 0"
        for analyze in (False, True):
            if analyze:
                await repository.analyze()
            session = await repository.readonly_session("main")
            found = await whole_mask(await session.where(where, region=region))
            np.testing.assert_array_equal(found, wanted & inside)


async def test_candidates_are_known_before_a_chunk_is_read() -> None:
    """Excluded chunks are never read, nor are those of which all cells fulfil the conditions."""
    async with open_storage(memory_url()) as plain:
        storage = LatencyStorage(plain, seconds=0)
        async with Repository.create(storage, config=NO_INLINE) as repository:
            t = await field(repository)
            await repository.analyze()
        async with Repository.open(storage, config=NO_INLINE) as repository:
            session = await repository.readonly_session("main")
            storage.forget()
            selection = await session.where("t > 280")
            assert not [key for _, key in storage.log if key.startswith("chunks/")]
            assert (selection.chunks, len(selection.candidates)) == (100, 20)
            assert selection.candidates[:10, 0].tolist() == [0] * 10
            assert selection.bytes_candidates == 20 * 400
            assert selection.bytes_excluded == 80 * 400
            assert [it[0] for it in selection.boxes()[::10]] == [slice(0, 10), slice(90, 100)]
            assert int((await whole_mask(selection)).sum()) == int((t > 280).sum())
            read = [key for _, key in storage.log if key.startswith("chunks/")]
            assert len(read) == int(np.count_nonzero(~selection.certain))


async def test_missing_values_are_in_no_mask() -> None:
    """A chunk whose values all fulfil the conditions is not taken whole if some are missing."""
    async with Repository.create(memory_url(), config=NO_INLINE) as repository:
        await commit_array(repository, np.array([5, np.nan, 6, 7, 8, 9]), (3,))
        await repository.analyze()
        session = await repository.readonly_session("main")
        selection = await session.where("a > 4")
        assert selection.certain.tolist() == [False, True]
        found = await whole_mask(selection)
        assert found.tolist() == [True, False, True, True, True, True]


async def test_conditions_that_name_nothing_are_refused() -> None:
    """No condition, and no such array."""
    async with Repository.create(memory_url()) as repository:
        await commit_array(repository, np.arange(4), (2,))
        session = await repository.readonly_session("main")
        with pytest.raises(InvalidInputError, match="There is no condition"):
            await session.where(" ")
        with pytest.raises(NodeNotFoundError):
            await session.where("b > 3")
        with pytest.raises(NodeNotFoundError):
            await session.where("a > 3", group="g")


def test_blocking_code_iterates_over_masks(tmp_path: Path) -> None:
    """Errors in the arguments are raised at once."""
    import zarr

    repository = BlockingRepository.create(str(tmp_path / "r"))
    session = repository.writable_session("main")
    zarr.create_array(session.store, name="a", data=np.arange(12), chunks=(3,))
    session.commit("data")
    repository.analyze()
    session = repository.readonly_session("main")
    found = [it.indices().ravel().tolist() for it in session.where("a > 7")]
    assert found == [[8], [9, 10, 11]]
    with pytest.raises(InvalidInputError):
        session.where("a >")
