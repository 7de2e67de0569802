"""Whole repositories in buckets: many writers, a restarted server, a bad network."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

import pytest

from tests.servers.faulty_network import ConformanceThroughFaults, FaultyHistories
from tests.servers.s3.running import Server, ministack
from tests.servers.whole_repository import WholeRepository

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping


@pytest.fixture(scope="module")
def keeping_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """Run ministack so that it finds its objects again after a restart."""
    with ministack(tmp_path_factory.mktemp("keeping"), persistent=True) as server:
        yield server


class TestS3Repository(WholeRepository):
    """Without faults, but for restarts."""

    @pytest.fixture
    def server(self, keeping_server: Server) -> Server:
        """Return the server."""
        return keeping_server


@pytest.mark.thorough
class TestMotoRepository(WholeRepository):
    """A second code base, with the version of the format that asks most of conditions."""

    no_restart = "moto keeps its objects in memory only"

    @pytest.fixture(params=[2], ids=["spec2"])
    def spec(self, request: pytest.FixtureRequest) -> int:
        """Return the version of the format."""
        version: int = request.param
        return version

    @pytest.fixture
    def server(self, moto_server: Server) -> Server:
        """Return the server."""
        return moto_server


class TestS3Histories(FaultyHistories):
    """With every fault."""

    @pytest.fixture
    def server(self, ministack_server: Server) -> Server:
        """Return the server."""
        return ministack_server


class TestS3ThroughFaults(ConformanceThroughFaults):
    """The whole suite on a bad network."""

    deviations: ClassVar[Mapping[str, str]] = {
        "test_a_key_of_the_greatest_length_is_a_key": "S3 counts the storage's prefix as well"
    }

    many_keys = 1100

    @pytest.fixture
    def server(self, ministack_server: Server) -> Server:
        """Return the server."""
        return ministack_server
