"""Large objects on S3 through zarr.

On loopback, where nothing but the contenders takes time; over the network it is mostly the network
that does.
"""

from __future__ import annotations

from contextlib import ExitStack
from typing import TYPE_CHECKING, Any
from uuid import uuid4

import pytest
import zarr

from benchmarks.contest import FLOOR
from benchmarks.peers import chunked, numbers
from benchmarks.s3_peers import OBSTORE, PLAIN
from benchmarks.test_s3_requests import opened

if TYPE_CHECKING:
    from benchmarks.contest import Contest
    from benchmarks.s3_server import S3Server

LARGE = 10 << 20


@pytest.mark.parametrize("method", ["GET", "PUT"])
@pytest.mark.parametrize(
    ("count", "chunk_bytes", "at_once"),
    [(64, 2**20, 16), (2, 100 * 2**20, 2)],
    ids=["1-mb", "100-mb"],
)
def test_large(
    contest: Contest, s3: S3Server, method: str, count: int, chunk_bytes: int, at_once: int
) -> None:
    """Objects of 1 MB and 100 MB."""
    if contest.is_quick:
        count, chunk_bytes = 2, 2**20
    data = numbers(count, chunk_bytes)
    with zarr.config.set({"async.concurrency": at_once}), ExitStack() as stack:
        arrays = opened(stack, s3.endpoint(), count, chunk_bytes, filled=method == "GET")
        plain = arrays[PLAIN].store

        def fresh(name: str) -> Any:
            if method == "PUT":  # a growing server waits for memory, with any writer
                s3.forget_large()
            if name == PLAIN and method == "PUT":
                # Who keeps versions writes new objects each time, which takes the server longer
                # than to replace what it has. So everybody does.
                return chunked(plain, count, chunk_bytes, uuid4().hex)
            return arrays.get(name)

        def work(array: Any) -> None:
            if method == "GET":
                assert array[:][-1] == data[-1]
            else:
                array[:] = data

        contest.race(
            f"S3: {method} {chunk_bytes >> 20} MB through zarr, {at_once} at a time",
            {**dict.fromkeys(arrays, work), FLOOR: lambda _: data.copy()},
            operations=count,
            rounds=15 if chunk_bytes < LARGE else 9,
            setup=fresh,
            finds_memory=1 if chunk_bytes < LARGE else 4,
            floor="copy the same bytes in memory",
            targets={"official": 0.9, PLAIN: 0.9, OBSTORE: 0.9},
            note="everybody writes new objects; older ones are deleted" if method == "PUT" else "",
        )


def test_encrypted(contest: Contest, s3: S3Server) -> None:
    """Read objects of 1 MB over TLS, in processes that trust the server's certificate."""
    names = ("ours", OBSTORE, "official", PLAIN)
    contest.children(
        "S3: GET 1 MB through zarr over TLS, 16 at a time",
        lambda: {
            name: (
                "benchmarks.encrypted:read",
                {
                    "contender": name,
                    "endpoint": s3.endpoint("tls"),
                    "near": s3.endpoint(),
                    "count": contest.pick(2, 64),
                    "rounds": contest.pick(1, 5),
                },
            )
            for name in names
        },
        metrics={"seconds": {}, "cpu seconds": {}},
        environment={"SSL_CERT_FILE": s3.certificate, "AWS_CA_BUNDLE": s3.certificate},
    )
