"""Options of the asyncio classes, through the facade: each does what it does there."""

from __future__ import annotations

import pickle
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import zarr

from icechunk_async import Packing, errors
from icechunk_async.engine import open as engine_open
from icechunk_async.engine import trusted
from icechunk_async.results import Progress
from icechunk_async.storage import CacheOptions, HedgePolicy, open_storage
from icechunk_async.sync import (
    IcechunkError,
    InvalidInputError,
    Repository,
    SessionStateError,
    Storage,
    deadline,
    local_filesystem_storage,
    upgrade_icechunk_repository,
)
from icechunk_async.sync.urls import open_url
from tests.helpers import memory_url
from tests.unit.storage.cache_tools import Counting

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Callable
    from pathlib import Path

ZARR: Any = zarr
ARRAY: Any = {"name": "a", "shape": (20, 1000), "chunks": (1, 1000), "dtype": "i4"}


class Bucket(Counting):
    """Memory that stands for a bucket, whose backend verifies nothing, and notes keys."""

    keys: list[str]

    async def before(self, operation: str, key: str) -> None:
        """Note a request."""
        self.keys.append(key)


class Service:
    """Opens every URL as the folder in memory that it names, and tells what was asked of it."""

    def __init__(self) -> None:
        """Begin."""
        self.keys: list[str] = []
        self.options: dict[str, object] = {}

    @asynccontextmanager
    async def open(self, url: str, **options: object) -> AsyncGenerator[Bucket]:
        """Open a URL."""
        self.options = options
        async with open_storage(url.replace("s3://", "memory://")) as plain:
            bucket = Bucket(plain)
            bucket.keys, bucket.url, bucket.options = self.keys, url, options
            yield bucket

    def asked(self, begin: str = "") -> list[str]:
        """Return the keys that were asked for, and forget them."""
        found = [it for it in self.keys if it.startswith(begin)]
        self.keys.clear()
        return found


@pytest.fixture
def service(monkeypatch: pytest.MonkeyPatch) -> Service:
    """Return a service that takes all URLs, which no test has tried."""
    made = Service()
    monkeypatch.setattr(engine_open, "open_storage", made.open)
    monkeypatch.setattr(trusted, "_tried", {})
    return made


def _url() -> str:
    return memory_url().replace("memory://", "s3://") + "/repository"


def _filled(repository: Repository) -> Repository:
    with repository.transaction("main", message="numbers") as store:
        array = ZARR.create_array(store, **ARRAY, compressors=None)
        array[:] = np.random.default_rng(0).integers(1, 1 << 30, (20, 1000))
    return repository


def _read(repository: Repository) -> Any:
    session = repository.readonly_session("main")
    return ZARR.open_array(session.store, path="a", mode="r")[:]


def test_a_second_read_is_served_by_the_cache_on_disk(service: Service, tmp_path: Path) -> None:
    """Of this object, of one that is opened later, of a pickled one, and of its sessions."""
    url, cache = _url(), CacheOptions(memory_bytes=0, directory=tmp_path / "cache")
    _filled(Repository.create(url))
    first = Repository.open(url, cache=cache)
    service.asked()
    values = _read(first)
    assert len(service.asked("chunks/")) == 20
    session = first.readonly_session("main")
    assert first.cache_statistics is not None
    assert first.cache_statistics.misses >= 20
    for again in (first, Repository.open(url, cache=cache), pickle.loads(pickle.dumps(first))):
        assert (_read(again) == values).all()
        assert not service.asked("chunks/")
        assert again.cache_statistics is not None
        assert again.cache_statistics.disk_hits >= 20
    elsewhere = pickle.loads(pickle.dumps(session))
    assert (ZARR.open_array(elsewhere.store, path="a", mode="r")[:] == values).all()
    assert not service.asked("chunks/")
    assert first.reopen().cache_statistics is not None
    assert Repository.open(url).cache_statistics is None


@pytest.mark.parametrize("name", ["create", "open_or_create"])
def test_packing_is_stored_at_creation(name: str, tmp_path: Path) -> None:
    """And a handle may pack otherwise, which it keeps where it travels."""
    place = tmp_path / "repository"
    make: Callable[..., Repository] = getattr(Repository, name)
    made = make(place, packing=Packing())
    assert Repository.open(place).packing == Packing() == made.packing
    _filled(made)
    assert len(list((place / "chunks").iterdir())) == 1
    plain = pickle.loads(pickle.dumps(Repository.open(place, packing=Packing.off())))
    session = plain.writable_session("main")
    ZARR.open_array(session.store, path="a")[:7] = 1
    session.commit("seven")
    assert len(list((place / "chunks").iterdir())) == 8
    plain.save_packing()
    assert Repository.open(place).packing == Packing.off()


def test_a_trial_of_the_storage_is_made_or_not(service: Service) -> None:
    """``probe=False`` takes fewer requests, and ``probe=True`` more than trust does."""
    Repository.create(_url(), probe=False)
    unasked = len(service.asked())
    Repository.create(_url())
    tried = len(service.asked())
    Repository.open_or_create(_url(), probe=True)
    assert tried > unasked + 10 < len(service.asked())


def test_hedging_travels(service: Service) -> None:
    """The policy is that of the native repository, here and where a pickle is opened."""
    policy = HedgePolicy(max_share=0.01)
    made = Repository.create(_url(), hedge=policy, probe=False)
    for it in (made, pickle.loads(pickle.dumps(made)), made.reopen()):
        assert it.handle.now().engine.request.hedge == policy


def test_options_of_a_backend_go_with_a_url(service: Service) -> None:
    """Wherever a place is named, and in pickles."""
    url, given = _url(), {"region": "eu-west-1"}
    made = Repository.create(url, storage_options=given, probe=False)
    assert service.options == given
    for look in (
        Repository.exists,
        Repository.fetch_config,
        Repository.fetch_layout,
        Repository.fetch_spec_version,
        Repository.open,
        Repository.open_or_create,
        open_url,
    ):
        service.options = {}
        look(url, storage_options=given)
        assert service.options == given, look
    service.options = {}
    assert pickle.loads(pickle.dumps(made)).list_branches() == {"main"}
    assert service.options == given


def test_layouts_are_made_and_told(tmp_path: Path) -> None:
    """Also that of storage without compare-and-set."""
    numbered = Repository.create(tmp_path / "one", layout="format-2-numbered")
    assert numbered.layout == Repository.fetch_layout(tmp_path / "one") == "format-2-numbered"
    made = Repository.open_or_create(tmp_path / "two", layout="format-2-numbered")
    assert made.layout == "format-2-numbered"
    assert Repository.create(tmp_path / "three", spec_version=1).layout == "format-1"
    assert Repository.fetch_layout(tmp_path / "four") is None
    with pytest.raises(InvalidInputError, match="layout"):
        Repository.create(tmp_path / "five", layout="round")
    assert not (tmp_path / "five").exists()


_WRONG = [
    ({"cache": "chunk-cache"}, r"cache= is a CacheOptions of icechunk_async.storage or None, not"),
    ({"packing": True}, r"packing= is a Packing of icechunk_async or None, not a bool\. Pass"),
    ({"hedge": 0.95}, r"hedge= is a HedgePolicy of icechunk_async.storage or None, not a float"),
    ({"storage_options": "region"}, r"storage_options maps names .* this str does not"),
    ({"storage_options": {1: 2}}, r"storage_options maps names .* this dict does not"),
]


@pytest.mark.parametrize(("wrong", "sentence"), _WRONG)
@pytest.mark.parametrize("name", ["open", "create", "open_or_create"])
def test_another_type_is_refused_with_one_sentence(
    name: str, wrong: dict[str, Any], sentence: str, tmp_path: Path
) -> None:
    """As an `InvalidInputError` that is a `TypeError`, before anything is written."""
    with pytest.raises(TypeError, match=sentence) as refused:
        getattr(Repository, name)(tmp_path / "repository", **wrong)
    assert isinstance(refused.value, IcechunkError)
    assert isinstance(refused.value, errors.WrongTypeError)
    assert not (tmp_path / "repository").exists()


def test_options_of_a_backend_are_refused_beside_a_storage(tmp_path: Path) -> None:
    """A storage has its own, which would count would be a guess."""
    storage = local_filesystem_storage(str(tmp_path))
    for look in (Repository.create, Repository.exists, Repository.fetch_config):
        with pytest.raises(InvalidInputError, match="this Storage has its own"):
            look(storage, storage_options={"region": "x"})
        with pytest.raises(IcechunkError, match="have no option 'colour'"):
            look(tmp_path / "r", storage_options={"colour": "red"})
    assert not list(tmp_path.iterdir())
    made = Repository.create(Storage.from_url(tmp_path / "r"), storage_options={})
    with pytest.raises(InvalidInputError, match="this Storage has its own"):
        made.copy_to(storage, storage_options={"region": "x"})


def test_an_upgraded_repository_keeps_its_settings(tmp_path: Path) -> None:
    """It is the same repository, opened again."""
    made = Repository.create(tmp_path, spec_version=1, packing=Packing(), cache=CacheOptions())
    upgraded = upgrade_icechunk_repository(made, dry_run=False)
    assert upgraded.packing == Packing()
    assert upgraded.cache_statistics is not None


def test_a_dry_run_of_expiration_names_what_the_real_one_removes(tmp_path: Path) -> None:
    """And changes nothing."""
    repository = _filled(Repository.create(tmp_path))
    for number in range(3):
        with repository.transaction("main", message=str(number)) as store:
            ZARR.open_array(store, path="a")[0] = number
    before = [it.id for it in repository.ancestry(branch="main")]
    log = len(list(repository.ops_log()))
    moment = repository.lookup_snapshot(before[1]).written_at
    planned = repository.expire_snapshots(moment, dry_run=True)
    assert planned == {*before[2:-1]} != set()
    assert [it.id for it in repository.ancestry(branch="main")] == before
    assert len(list(repository.ops_log())) == log
    assert repository.expire_snapshots(moment) == planned
    assert {it.id for it in repository.ancestry(branch="main")} == {*before} - planned


@pytest.mark.parametrize(
    "work",
    [
        lambda it, told: it.garbage_collect(
            it.lookup_snapshot(it.lookup_branch("main")).written_at, progress=told
        ),
        lambda it, told: it.chunk_storage_stats(progress=told),
        lambda it, told: it.rewrite_manifests("again", branch="main", progress=told),
        lambda it, told: it.check_references(progress=told),
        lambda it, told: it.verify(progress=told),
        lambda it, told: it.compact("main", min_live_share=1, progress=told),
        lambda it, told: it.analyze(progress=told),
        lambda it, told: it.add_sums(progress=told),
        lambda it, told: it.copy_to(memory_url(), progress=told),
    ],
    ids=["collect", "stats", "rewrite", "check", "verify", "compact", "analyze", "sums", "copy"],
)
def test_progress_is_reported(work: Callable[[Repository, Any], object], tmp_path: Path) -> None:
    """By every operation that reports it natively; what the function raises ends it."""
    repository = _filled(Repository.create(tmp_path, packing=Packing()))
    session = repository.writable_session("main")
    ZARR.open_array(session.store, path="a")[:18] = 2
    session.commit("most of it")

    def broken(_: Progress) -> None:
        raise LookupError("told")

    with pytest.raises(LookupError, match="told"):
        work(repository, broken)
    told: list[Progress] = []
    work(repository, told.append)
    assert told
    assert all(isinstance(it, Progress) for it in told)


def test_references_are_checked(tmp_path: Path) -> None:
    """`check_references` tells what is missing."""
    repository = _filled(Repository.create(tmp_path))
    assert not repository.check_references().broken
    victim = min((tmp_path / "chunks").iterdir())
    victim.unlink()
    (found,) = repository.check_references().broken
    assert found.location == f"chunks/{victim.name}"


def test_settings_and_counts_are_told(tmp_path: Path) -> None:
    """Those that can be given or stored."""
    repository = _filled(Repository.create(tmp_path, sums=True))
    assert (repository.sums, repository.keeps_statistics) == (True, False)
    assert repository.verified_reads is None
    careful = Repository.open(tmp_path, verify_reads=True, sums=False)
    assert not careful.sums
    _read(careful)
    assert careful.verified_reads is not None
    assert careful.verified_reads.verified == 20


def test_commits_are_followed_as_they_come(tmp_path: Path) -> None:
    """Each once, in order; a deadline ends the waiting."""
    repository = _filled(Repository.create(tmp_path))
    began = repository.lookup_branch("main")
    for number in range(2):
        with repository.transaction("main", message=str(number)) as store:
            ZARR.open_array(store, path="a")[0] = number
    following = repository.watch("main", since=began, poll_seconds=0.01)
    with deadline(60):  # else a wait for a third commit would have no end
        assert [next(following).message for _ in range(2)] == ["0", "1"]
    with pytest.raises(TimeoutError), deadline(0.2):
        next(following)
    with pytest.raises(IcechunkError, match="nothing"):
        next(repository.watch("nothing"))


def test_missing_forks_hold_up_what_waits_for_them(tmp_path: Path) -> None:
    """Amendments and flushes as well as commits, if that is asked for; overlaps may be refused."""
    repository = _filled(Repository.create(tmp_path))
    for publish in ("amend", "flush"):
        session = repository.writable_session("main")
        ZARR.open_array(session.store, path="a")[0] = 1
        forks = [session.fork(), session.fork()]
        with pytest.raises(SessionStateError, match="fork"):
            getattr(session, publish)("early", allow_missing_forks=False)
        for fork in forks:
            ZARR.open_array(fork.store, path="a")[5] = 7
        with pytest.raises(IcechunkError, match="/a"):
            session.merge(*forks, allow_overlaps=False)
        session.merge(*forks)
        getattr(session, publish)("whole", allow_missing_forks=False)


def test_chunks_are_moved_with_all_coordinates_at_once(tmp_path: Path) -> None:
    """One call of each function."""
    repository = _filled(Repository.create(tmp_path))
    before = _read(repository)
    calls: list[tuple[int, ...]] = []

    def turned(rows: Any) -> Any:
        calls.append(rows.shape)
        rows[:, 0] = 19 - rows[:, 0]
        return rows

    session = repository.writable_session("main")
    session.reindex_array("/a", turned, turned, vectorized=True)
    session.commit("upside down")
    assert calls[0] == (20, 2)
    assert len(calls) <= 2
    assert (_read(repository) == before[::-1]).all()


def test_a_session_tells_of_its_lease_and_its_commit(tmp_path: Path) -> None:
    """A session that only reads has neither."""
    repository = _filled(Repository.create(tmp_path))
    session = repository.writable_session("main", lease=True)
    assert (session.has_lease, session.outcome_unknown) == (True, False)
    assert not repository.writable_session("main").has_lease
    reading = repository.readonly_session("main")
    for it in (reading, pickle.loads(pickle.dumps(reading))):
        assert not it.has_lease
        assert not it.outcome_unknown
