"""Read TileDB arrays where they are.

Beside TileDB's own library, on arrays that it wrote on the local disk; both open the array in each
turn.
"""

from __future__ import annotations

import asyncio
from functools import partial
from typing import TYPE_CHECKING, Any
from uuid import uuid4

import numpy as np
import pytest

from benchmarks.s3_peers import BUCKET, s3_options
from benchmarks.s3_server import KEYS
from icechunk_async.storage import open_storage
from icechunk_async.tiledb import open_array

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from benchmarks.contest import Contest
    from benchmarks.s3_server import S3Server

theirs: Any = pytest.importorskip("tiledb", reason="the peer, TileDB-Py, is not installed")
# TileDB-Py itself uses what others have deprecated.
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")


def _filters(name: str) -> Any:
    found = {
        "none": [],
        "byteshuffle and zstd": [theirs.ByteShuffleFilter(), theirs.ZstdFilter(level=3)],
    }
    return theirs.FilterList(found[name])


def _dense(url: str, size: int, filters: str) -> None:
    """Write a square of tiles of 1 MB."""
    dims = [
        theirs.Dim(name, domain=(0, size - 1), tile=min(size, 512), dtype="int32") for name in "yx"
    ]
    attribute = theirs.Attr("a", dtype="f4", filters=_filters(filters))
    theirs.Array.create(url, theirs.ArraySchema(theirs.Domain(*dims), [attribute]))
    y, x = np.mgrid[0:size, 0:size]
    with theirs.open(url, "w") as array:
        array[:] = (np.sin(y / 50) * np.cos(x / 70) * 100).round(1).astype("f4")


@pytest.mark.parametrize("filters", ["none", "byteshuffle and zstd"])
def test_read_dense(contest: Contest, tmp_path: Path, filters: str) -> None:
    """All of an array of one fragment."""
    url, size = str(tmp_path / "dense"), contest.pick(64, 4096)
    _dense(url, size, filters)

    async def ours() -> None:
        async with open_array(url) as array:
            assert (await array.read())["a"].shape == (size, size)

    def peer() -> None:
        with theirs.open(url) as array:
            assert array[:]["a"].shape == (size, size)

    with asyncio.Runner() as runner:
        contest.race(
            f"read a dense array of 64 MB, filters: {filters}",
            {"ours": lambda: runner.run(ours()), "tiledb": peer},
            targets={"tiledb": 0.5},
        )


def test_scan_sparse(contest: Contest, tmp_path: Path) -> None:
    """A hundredth of the rows, by a range of one coordinate, as columns."""
    url, count = str(tmp_path / "sparse"), contest.pick(1000, 2_000_000)
    dims = [theirs.Dim(name, domain=(0, 999_999), tile=1000, dtype="int64") for name in "yx"]
    attribute = theirs.Attr("v", dtype="f8", filters=_filters("byteshuffle and zstd"))
    schema = theirs.ArraySchema(theirs.Domain(*dims), [attribute], sparse=True, capacity=10_000)
    theirs.Array.create(url, schema)
    cells = np.random.default_rng(1).choice(10**12, count, replace=False)
    with theirs.open(url, "w") as array:
        array[cells // 10**6, cells % 10**6] = np.arange(count, dtype="f8")
    low, high = 500_000, 510_000
    expected = int(((cells // 10**6 >= low) & (cells // 10**6 < high)).sum())

    async def ours() -> None:
        async with open_array(url) as array:
            scan = await array.scan(filters=[("y", ">=", low), ("y", "<", high)])
            assert (await scan.to_table()).num_rows == expected

    def peer() -> None:
        with theirs.open(url) as array:
            found = array.query(order="U").multi_index[low : high - 1, :]
            assert len(found["v"]) == expected

    with asyncio.Runner() as runner:
        contest.race(
            "scan 20,000 of 2,000,000 cells of a sparse array by a coordinate",
            {"ours": lambda: runner.run(ours()), "tiledb": peer},
        )


@pytest.mark.parametrize("count", [1, 100, 10_000])
def test_open(contest: Contest, tmp_path: Path, count: int) -> None:
    """An array of many fragments, none consolidated."""
    if count > 100 and contest.size != "huge":
        pytest.skip("ten thousand fragments take minutes to write: use --size huge")
    url, made = str(tmp_path / "fragments"), contest.pick(min(count, 3), count)
    dim = theirs.Dim("x", domain=(0, 100 * made - 1), tile=100, dtype="int32")
    schema = theirs.ArraySchema(theirs.Domain(dim), [theirs.Attr("a", dtype="i4")])
    theirs.Array.create(url, schema)
    for number in range(made):
        with theirs.open(url, "w", timestamp=number + 1) as array:
            array[number * 100 : (number + 1) * 100] = np.arange(100, dtype="i4")

    async def ours() -> None:
        async with open_array(url) as array:
            assert len(array.fragments) == made

    def peer() -> None:
        with theirs.open(url) as array:
            assert array.nonempty_domain() is not None

    with asyncio.Runner() as runner:
        contest.race(
            f"open an array of {count:,} fragments",
            {"ours": lambda: runner.run(ours()), "tiledb": peer},
        )


def _on_s3(s3: S3Server, local: Path) -> tuple[str, dict[str, Any], Any]:
    """Put an array into a bucket; return its URL, our options, and TileDB's context."""
    name = f"tiledb/{uuid4().hex}"
    options = s3_options(s3.endpoint())

    files = [it for it in local.rglob("*") if it.is_file()]
    contents = {it.relative_to(local).as_posix(): it.read_bytes() for it in files}

    async def upload() -> None:
        async with open_storage(f"s3://{BUCKET}/{name}", **options) as storage:
            for key, data in contents.items():
                await storage.put(key, data)

    asyncio.run(upload())
    context = theirs.Ctx(
        {
            "vfs.s3.endpoint_override": s3.endpoint().removeprefix("http://"),
            "vfs.s3.scheme": "http",
            "vfs.s3.use_virtual_addressing": "false",
            "vfs.s3.region": "us-east-1",
            "vfs.s3.aws_access_key_id": KEYS["access_key_id"],
            "vfs.s3.aws_secret_access_key": KEYS["secret_access_key"],
        }
    )
    return f"s3://{BUCKET}/{name}", options, context


def _counted(s3: S3Server, work: Callable[[], None]) -> int:
    s3.counts()
    work()
    return sum(s3.counts().values())


@pytest.mark.parametrize("fragments", [1, 20])
def test_requests_of_a_dense_array(
    contest: Contest, s3: S3Server, tmp_path: Path, fragments: int
) -> None:
    """To open, and to open and read all: never more than TileDB makes."""
    local, size = tmp_path / "dense", 400
    dims = [theirs.Dim(name, domain=(0, size - 1), tile=20, dtype="int32") for name in "yx"]
    schema = theirs.ArraySchema(theirs.Domain(*dims), [theirs.Attr("a", dtype="f4")])
    theirs.Array.create(str(local), schema)
    step = size // fragments
    for number in range(fragments):
        with theirs.open(str(local), "w", timestamp=number + 1) as array:
            array[number * step : (number + 1) * step, :] = np.ones((step, size), "f4")
    url, options, context = _on_s3(s3, local)

    async def ours(*, reads: bool) -> None:
        async with open_array(url, storage_options=options) as array:
            assert not reads or (await array.read())["a"].sum() == size * size

    def run(*, reads: bool) -> None:
        asyncio.run(ours(reads=reads))

    def peer(*, reads: bool) -> None:
        with theirs.open(url, ctx=context) as array:
            assert array.nonempty_domain() is not None
            assert not reads or array[:]["a"].sum() == size * size

    # Four listings, the schema and a footer for each fragment; and the tiles of each in one piece.
    for reads, expected in ((False, 5 + fragments), (True, 5 + 2 * fragments)):
        own = _counted(s3, partial(run, reads=reads))
        others = _counted(s3, partial(peer, reads=reads))
        assert own == expected
        assert own <= others
        contest.add(
            f"{'read' if reads else 'open'} a dense array of {fragments} fragments on S3",
            {"ours": [own], "tiledb": [others]},
            metric="requests",
            targets={"tiledb": 1.0},
        )


def test_requests_of_a_sparse_array(contest: Contest, s3: S3Server, tmp_path: Path) -> None:
    """A slice of an array of five fragments: never more than TileDB makes."""
    local, count = tmp_path / "sparse", 5000
    dim = theirs.Dim("x", domain=(0, 5 * count - 1), tile=1000, dtype="int64")
    schema = theirs.ArraySchema(
        theirs.Domain(dim), [theirs.Attr("v", dtype="f8")], sparse=True, capacity=500
    )
    theirs.Array.create(str(local), schema)
    for number in range(5):
        with theirs.open(str(local), "w", timestamp=number + 1) as array:
            array[np.arange(number * count, (number + 1) * count)] = np.ones(count)
    url, options, context = _on_s3(s3, local)

    async def ours() -> None:
        async with open_array(url, storage_options=options) as array:
            scan = await array.scan(filters=[("x", ">=", 1000), ("x", "<", 2000)])
            assert (await scan.to_table()).num_rows == 1000

    def peer() -> None:
        with theirs.open(url, ctx=context) as array:
            assert len(array[1000:2000]["v"]) == 1000

    own, others = _counted(s3, lambda: asyncio.run(ours())), _counted(s3, peer)
    # Four listings, the schema, five footers with their trees, and two files of one fragment.
    assert own == 12
    assert own <= others
    contest.add(
        "read a slice of a sparse array of 5 fragments on S3",
        {"ours": [own], "tiledb": [others]},
        metric="requests",
        targets={"tiledb": 1.0},
    )
