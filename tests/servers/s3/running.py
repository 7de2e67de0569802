"""Servers of S3's protocol as processes on loopback: started, waited for, stopped, logged."""

from __future__ import annotations

import asyncio
import os
import sys
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final
from uuid import uuid4

import botocore.session
from botocore.config import Config

from tests.servers.process import ServerProcess, free_port
from tests.servers.whole_repository import Location

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

__all__ = ["KEYS", "Server", "ministack", "moto", "rclone", "s3_client"]

KEYS: Final = {"access_key_id": "AKIAIOSFODNN7EXAMPLE", "secret_access_key": "not-a-secret-key"}
"""Credentials that servers accept which accept all of them."""

_HERE: Final = Path(__file__).parent


class Server(ServerProcess):
    """A process that speaks S3's protocol."""

    @cached_property
    def _client(self) -> Any:
        """To make a client takes ten times as long as to make a bucket."""
        return s3_client(self.endpoint)

    def bucket(self) -> str:
        """Make a bucket and answer its name. Blocks."""
        name = f"bucket-{uuid4()}"
        self._client.create_bucket(Bucket=name)
        return name

    def location(self, endpoint: str) -> Location:
        """Return a new bucket, reached through ``endpoint``. Blocks."""
        options = {**self.options(), "endpoint_url": endpoint}
        return Location(f"s3://{self.bucket()}/a/prefix", options)

    async def restart(self) -> None:
        """End it and start it again, with what it has on disk."""
        await asyncio.to_thread(self.stop)
        await asyncio.to_thread(self.start)

    def options(self) -> dict[str, Any]:
        """Return the options that open a storage on it."""
        return {"endpoint_url": self.endpoint, "region": "us-east-1", "allow_http": True, **KEYS}


def s3_client(endpoint: str, **keys: str) -> Any:
    """Return a client of botocore itself, as somebody else would use."""
    return botocore.session.get_session().create_client(
        "s3",
        endpoint_url=endpoint,
        region_name="us-east-1",
        aws_access_key_id=keys.get("access_key_id", KEYS["access_key_id"]),
        aws_secret_access_key=keys.get("secret_access_key", KEYS["secret_access_key"]),
        # By path, since names of buckets below localhost do not resolve.
        config=Config(s3={"addressing_style": "path"}, retries={"total_max_attempts": 3}),
    )


@contextmanager
def _running(make: Callable[[int], Server]) -> Iterator[Server]:
    server = make(free_port())
    server.start()
    try:
        yield server
    finally:
        server.stop()


@contextmanager
def ministack(folder: Path, *, persistent: bool = False, auth: bool = False) -> Iterator[Server]:
    """Run ministack: one event loop, so that its look and its write are one step."""
    environment = {
        "BIND_HOST": "127.0.0.1",
        "SERVICES": "s3,iam,sts" if auth else "s3",
        "LOG_LEVEL": "WARNING",
        **({"AUTH": "true"} if auth else {}),
    }
    if persistent:
        environment |= {
            "S3_PERSIST": "1",
            "PERSIST_STATE": "1",
            "S3_DATA_DIR": str(folder / "data"),
            "STATE_DIR": str(folder / "state"),
        }
    program = str(Path(sys.executable).with_name("ministack"))

    def make(port: int) -> Server:
        return Server(
            [program], port, folder / "ministack.log", {**environment, "GATEWAY_PORT": str(port)}
        )

    with _running(make) as server:
        yield server


@contextmanager
def moto(folder: Path) -> Iterator[Server]:
    """Run moto behind a lock, without which its look and its write are two steps."""

    def make(port: int) -> Server:
        program = [sys.executable, str(_HERE / "locked_moto.py"), str(port)]
        return Server(program, port, folder / "moto.log")

    with _running(make) as server:
        yield server


@contextmanager
def rclone(folder: Path) -> Iterator[Server]:
    """Run rclone's S3 server, which ignores every condition."""

    def make(port: int) -> Server:
        keys = ",".join(KEYS.values())
        program = str(Path(sys.executable).with_name("rclone"))
        return Server(
            [
                *(program, "--config", os.devnull, "serve", "s3"),
                *("--addr", f"127.0.0.1:{port}", "--auth-key", keys, ":memory:"),
            ],
            port,
            folder / "rclone.log",
        )

    with _running(make) as server:
        yield server
