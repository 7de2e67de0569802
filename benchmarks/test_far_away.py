"""Storage that is far away.

Blocking classes of both engines, on a server of S3's protocol behind a wire that takes a fixed
time, or one that varies. Here counts what has to follow one another; the number of dependent round
trips is asserted where a clock jumps from one request to the next.
"""

from __future__ import annotations

import asyncio
import http.client
from contextlib import contextmanager
from itertools import count
from typing import TYPE_CHECKING, Any
from uuid import uuid4

import pytest
import zarr
from zarr.core.buffer import default_buffer_prototype

from benchmarks.contest import FLOOR
from benchmarks.peers import chunked, create, open_repository, tip_store
from benchmarks.s3_peers import blocking_storage
from benchmarks.s3_server import WIRES
from icechunk_async import Repository
from icechunk_async.engine import trusted
from icechunk_async.storage import open_storage
from icechunk_async.testing.latency import LatencyStorage
from icechunk_async.testing.virtual_time import VirtualTimeLoop
from icechunk_async_s3.connections import Connections

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from benchmarks.contest import Contest
    from benchmarks.s3_server import S3Server

ENGINES = ("ours", "official")
CREATIONS = {
    "create": "create a repository",
    "create-first": "create the first repository at a service that is not known",
    "create-documented": "create the first repository at a service that documents its writes",
}
OPERATIONS = (*CREATIONS, "commit", "cold-read")
COMMIT_TRIPS = 2
READ_TRIPS = 4
_PROTOTYPE = default_buffer_prototype()
_NODE = (
    b'{"zarr_format":3,"node_type":"array","shape":[2000],"data_type":"uint8",'
    b'"chunk_grid":{"name":"regular","configuration":{"chunk_shape":[1000]}},'
    b'"chunk_key_encoding":{"name":"default","configuration":{"separator":"/"}},'
    b'"codecs":[{"name":"bytes"}],"fill_value":0}'
)


@contextmanager
def _waiting(server: S3Server, wire: str, trips: int) -> Iterator[Callable[[object], None]]:
    """Return a function that sends empty requests, one after another, over an open connection."""
    connection = http.client.HTTPConnection("127.0.0.1", server.ports[wire])

    def wait(_: object) -> None:
        for _trip in range(trips):
            connection.request("GET", "/-/nothing")
            connection.getresponse().read()

    try:
        wait(None)
        yield wait
    finally:
        connection.close()


@pytest.mark.parametrize("wire", ["20 ms", "50 ms"])
@pytest.mark.parametrize("operation", OPERATIONS)
@pytest.mark.parametrize("spec", [2, 1])
def test_far(
    contest: Contest,
    s3: S3Server,
    monkeypatch: pytest.MonkeyPatch,
    operation: str,
    wire: str,
    spec: int,
) -> None:
    """Create a repository; commit one chunk; open one and read a chunk."""
    if operation == "create-documented":
        monkeypatch.setattr(Connections, "is_documented", True)
    end = s3.endpoint("near" if contest.is_quick else wire)
    prefixes = {engine: uuid4().hex for engine in ENGINES}
    repositories = {}
    for engine, prefix in prefixes.items():
        storage = blocking_storage(engine, s3.endpoint(), prefix)
        session = create(engine, storage, spec=spec).writable_session("main")
        chunked(session.store, 10, 8000)[:] = 1
        session.commit("filled")
        repositories[engine] = _open_far(engine, end, prefix)
    values = count(2)

    def fresh(name: str) -> Any:
        if operation in CREATIONS:
            if operation != "create":  # as if this process had tried nothing yet
                trusted._tried.clear()
            return blocking_storage(name, end, uuid4().hex) if name in ENGINES else None
        if operation == "cold-read" or name == FLOOR:
            return blocking_storage(name, end, prefixes[name]) if name in ENGINES else None
        session = repositories[name].writable_session("main")
        zarr.open_array(session.store, path="a")[:1000] = next(values)
        return session

    def created(engine: str) -> Callable[[Any], object]:
        return lambda storage: create(engine, storage, spec=spec)

    def read(engine: str) -> Callable[[Any], object]:
        return lambda storage: zarr.open_array(tip_store(engine, storage), path="a", mode="r")[2000]

    def commit(session: Any) -> None:
        session.commit("one chunk")

    chosen: dict[str, tuple[dict[str, Callable[[Any], object]], int, float | None, str]] = {
        **{
            it: ({engine: created(engine) for engine in ENGINES}, 3, None, title)
            for it, title in CREATIONS.items()
        },
        "commit": (dict.fromkeys(ENGINES, commit), COMMIT_TRIPS, 2.0, "commit one chunk"),
        "cold-read": (
            {it: read(it) for it in ENGINES},
            READ_TRIPS,
            1 / 0.65,
            "open cold and read a chunk",
        ),
    }
    contenders, trips, target, title = chosen[operation]
    seconds, jitter = WIRES[wire]
    away = f"{seconds * 1e3:.0f} ms" + (f" to {(seconds + jitter) * 1e3:.0f} ms" if jitter else "")
    near = "near" if contest.is_quick else wire
    with _waiting(s3, near, trips) as waiting:
        contest.race(
            f"S3 {away} away: {title}, format {spec}",
            {**contenders, FLOOR: waiting},
            rounds=7,
            setup=fresh,
            targets={} if target is None else {"official": target},
            floor=f"{trips} requests one after another",
        )


def _open_far(engine: str, end: str, prefix: str) -> Any:
    """Open a repository and use its connections once."""
    opened = open_repository(engine, blocking_storage(engine, end, prefix))
    session = opened.writable_session("main")
    zarr.open_array(session.store, path="a")[:1000] = 0
    session.commit("connected")
    return opened


@pytest.mark.parametrize("spec", [2, 1])
@pytest.mark.parametrize(("operation", "trips"), [("commit", COMMIT_TRIPS), ("read", READ_TRIPS)])
def test_round_trips(contest: Contest, operation: str, trips: int, spec: int) -> None:
    """Dependent round trips, counted by a clock that jumps a second for each."""
    url = f"memory://{uuid4().hex}"

    async def scenario() -> float:
        async with Repository.create(url, spec_version=spec) as repository:
            session = await repository.writable_session("main")
            for key, value in (("zarr.json", _NODE), ("c/0", bytes(1000))):
                await session.store.set(f"a/{key}", _PROTOTYPE.buffer.from_bytes(value))
            await session.commit("filled")
        async with open_storage(url) as plain:
            storage = LatencyStorage(plain, seconds=1)
            clock = asyncio.get_running_loop().time
            began = clock()
            async with Repository.open(storage) as repository:
                if operation == "read":
                    store = (await repository.readonly_session("main")).store
                    assert await store.get("a/c/0", _PROTOTYPE) is not None
                    return clock() - began
                session = await repository.writable_session("main")
                await session.store.set("a/c/1", _PROTOTYPE.buffer.from_bytes(bytes(999)))
                await session.store.get("a/c/0", _PROTOTYPE)  # the manifest is known
                began = clock()
                await session.commit("one chunk")
                return clock() - began

    with asyncio.Runner(loop_factory=VirtualTimeLoop) as runner:
        found = runner.run(scenario())
    assert found == trips
    names = {"commit": "commit one chunk", "read": "open cold and read a chunk"}
    contest.add(f"{names[operation]}, format {spec}", {"ours": [found]}, metric="round trips")


@pytest.mark.parametrize("spec", [2, 1])
@pytest.mark.parametrize("operation", ["commit", "cold-read"])
def test_requests(contest: Contest, s3: S3Server, operation: str, spec: int) -> None:
    """All requests, as the server counts them."""
    samples: dict[str, list[float]] = {}
    for engine in ENGINES:
        prefix = uuid4().hex
        storage = blocking_storage(engine, s3.endpoint(), prefix)
        repository = create(engine, storage, spec=spec)
        session = repository.writable_session("main")
        chunked(session.store, 10, 8000)[:] = 1
        session.commit("filled")
        s3.counts()
        if operation == "cold-read":
            array = zarr.open_array(tip_store(engine, storage), path="a", mode="r")
            assert array[2000] == 1
        else:
            session = repository.writable_session("main")
            zarr.open_array(session.store, path="a")[:1000] = 2
            session.commit("one chunk")
        samples[engine] = [float(sum(s3.counts().values()))]
    assert samples["ours"] <= samples["official"]
    title = {"commit": "change one chunk and commit", "cold-read": "open cold and read a chunk"}
    contest.add(f"S3: {title[operation]}, format {spec}", samples, metric="requests")
