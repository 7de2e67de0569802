"""The command on a real socket: Zarr over fsspec reads it, signals end it."""

from __future__ import annotations

import asyncio
import signal
import socket
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

import numpy as np
import pytest
import zarr
from zarr.api.asynchronous import open_group

from icechunk_async import Repository
from tests.unit.cli.conftest import run
from tests.unit.gateway.serving import Server, serving

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

TOKEN = "reader-0123456789abcdef"  # noqa: S105 -- opens nothing
VALUES = np.arange(64 * 64, dtype="int32").reshape(64, 64)


async def _fill(path: Path) -> None:
    async with Repository.create(path) as repository:
        session = await repository.writable_session("main")
        root = await open_group(store=session.store, mode="a")
        group = await root.create_group("ocean")
        array = await group.create_array("t", shape=(64, 64), chunks=(32, 32), dtype="int32")
        await array.setitem(slice(None), VALUES)
        await session.commit("filled")


@pytest.fixture(scope="module")
def repository(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Make a repository on disk."""
    path = tmp_path_factory.mktemp("served") / "repository"
    asyncio.run(_fill(path))
    return path


@pytest.fixture(scope="module")
def server(repository: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """Serve it; an interrupt ends it as it ends all commands, without a traceback."""
    with serving(repository, tmp_path_factory.mktemp("log")) as server:
        yield server
        server.process.send_signal(signal.SIGINT)
        assert server.process.wait(60) == 130
    assert "Traceback" not in server.log.read_text(encoding="utf-8")


def test_a_cold_open_and_a_slice_take_two_requests(server: Server) -> None:
    """Zarr over fsspec: the root's document brings all others, and then there is one chunk."""
    server.requests()
    group = zarr.open_group(f"{server.url}/@branch.main", mode="r", zarr_format=3)
    array = group["ocean/t"]
    assert isinstance(array, zarr.Array)
    assert np.array_equal(array[5, :30], VALUES[5, :30])
    asked = [(method, target, status) for _, method, target, status in server.requests(least=2)]
    assert asked == [
        ("GET", "/@branch.main/zarr.json", 200),
        ("GET", "/@branch.main/ocean/t/c/0/0", 200),
    ]
    assert np.array_equal(array[:], VALUES)


def test_bytes_that_are_not_http_end_in_400(server: Server) -> None:
    """So do headers and a line without end, which are not collected; the server continues."""
    parts = urlsplit(server.url)
    for sent in (
        b"\x16\x03\x01\x02\x00\r\n\r\n",
        b"GET / HTTP/1.1\r\nx: " + b"y" * (1 << 20),
        b"GET /" + b"z" * (1 << 20),
    ):
        with socket.create_connection((parts.hostname, parts.port), timeout=60) as client:
            try:
                client.sendall(sent)
                reply = client.recv(65536)
            except ConnectionError:  # it has read enough
                continue
            assert reply.startswith(b"HTTP/1.1 400 ")
            assert b"Traceback" not in reply
    with socket.create_connection((parts.hostname, parts.port), timeout=60) as client:
        client.sendall(b"GET /@branch.main/../../etc/passwd HTTP/1.1\r\nhost: x\r\n\r\n")
        assert client.recv(65536).startswith(b"HTTP/1.1 400 ")
    assert zarr.open_group(f"{server.url}/@branch.main", mode="r", zarr_format=3)


def test_a_token_opens_what_its_grant_says(repository: Path, tmp_path: Path) -> None:
    """The file is read at the start; the log has the principal; SIGTERM ends it with 0."""
    grants = tmp_path / "grants.toml"
    grants.write_text(
        f'[[grant]]\nprincipal = "reader"\ntoken = "{TOKEN}"\npaths = ["/ocean"]\n',
        encoding="utf-8",
    )
    with serving(repository, tmp_path, "--grants", str(grants)) as server:
        options = {"client_kwargs": {"headers": {"Authorization": f"Bearer {TOKEN}"}}}
        group = zarr.open_group(
            f"{server.url}/@branch.main/ocean", mode="r", zarr_format=3, storage_options=options
        )
        array = group["t"]
        assert isinstance(array, zarr.Array)
        assert array[0, 1] == 1
        assert {who for who, *_ in server.requests(least=1)} == {"reader"}
        server.process.send_signal(signal.SIGTERM)
        assert server.process.wait(60) == 0
    assert TOKEN not in server.log.read_text(encoding="utf-8")


def test_what_cannot_be_served_is_told_in_a_sentence(repository: Path, tmp_path: Path) -> None:
    """A port that is taken, a host that does not exist, grants that cannot be read."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        for arguments, words in [
            (("--port", port), "Address already in use"),
            (("--host", "no host"), "cannot be listened at"),
            (("--grants", str(tmp_path / "none")), "cannot be read"),
            (("--authorize", "s3://none/"), "s3://none/"),
        ]:
            outcome = run("serve", str(repository), *arguments)
            assert (outcome.exit_code, outcome.stdout) == (1, "")
            assert words in outcome.stderr
            assert outcome.stderr.count("\n") == 1
    assert run("serve", str(tmp_path / "none")).exit_code == 1
