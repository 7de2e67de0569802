"""Values of the blocking facade beside the official ones: made, displayed, changed, compared."""

from __future__ import annotations

import copy
import pickle
from datetime import UTC, datetime
from functools import partial
from typing import TYPE_CHECKING, Any

import pytest

import icechunk_async.sync as facade
from icechunk_async import config as native
from tests.interop.facade_pair import alike, both, failing_alike
from tests.interop.theirs import icechunk

if TYPE_CHECKING:
    from collections.abc import Callable

WHEN = datetime(2020, 1, 2, 3, 4, 5, tzinfo=UTC)


def config_of(package: Any) -> Any:
    """Return a configuration where something is set in every section."""
    dims = package.ManifestSplitDimCondition
    rules = {
        package.ManifestSplitCondition.AnyArray(): {
            dims.Axis(1): 2,
            dims.DimensionName("time"): 3,
            dims.Any(): 4,
        }
    }
    preload = package.ManifestPreloadCondition
    return package.RepositoryConfig(
        inline_chunk_threshold_bytes=12,
        compression=package.CompressionConfig(level=7),
        caching=package.CachingConfig(num_chunk_refs=5),
        storage=package.StorageSettings(
            concurrency=package.StorageConcurrencySettings(2, 4096),
            retries=package.StorageRetriesSettings(max_tries=3),
            timeouts=package.StorageTimeoutSettings(connect_timeout_ms=10),
            storage_class="COLD",
            unsafe_use_metadata=True,
        ),
        virtual_chunk_containers={
            "s3://bucket/": package.VirtualChunkContainer(
                "s3://bucket/", package.s3_store(region="eu-1"), "named"
            )
        },
        manifest=package.ManifestConfig(
            package.ManifestPreloadConfig(1, preload.num_refs(None, 5) & preload.true(), 9),
            package.ManifestSplittingConfig.from_dict(rules),
            package.ManifestVirtualChunkLocationCompressionConfig(4, compression_level=2),
            3,
        ),
        max_concurrent_decodes=6,
    )


def test_a_whole_configuration_is_displayed_alike() -> None:
    """Every section, nested as in the official display, as an expression and as text."""
    alike(config_of)


SECTIONS: dict[str, Callable[[Any], object]] = {
    "compression": lambda it: it.CompressionConfig(),
    "algorithm": lambda it: it.CompressionAlgorithm.Zstd,
    "caching": lambda it: it.CachingConfig.default(),
    "preload": lambda it: it.config.ManifestConfig(),
    "location compression": lambda it: it.ManifestVirtualChunkLocationCompressionConfig(),
    "settings": lambda it: it.StorageSettings(),
    "retries": lambda it: it.StorageRetriesSettings(1, 2, 3),
    "concurrency": lambda it: it.StorageConcurrencySettings(),
    "timeouts": lambda it: it.StorageTimeoutSettings(1, 2),
    "options": lambda it: it.S3Options(checksum_algorithm=it.ChecksumAlgorithm.Sha1),
    "splitting": lambda it: it.ManifestSplittingConfig(),
    "default": lambda it: it.RepositoryConfig.default(),
    "in memory": lambda it: it.ObjectStoreConfig.InMemory(),
    "files": lambda it: it.local_filesystem_store("/data"),
    "gcs": lambda it: it.gcs_store(),
    "azure": lambda it: it.storage.azure_store(account="name"),
    "s3": lambda it: it.s3_store(s3_compatible=True, requester_pays=True),
    "tigris": lambda it: it.ObjectStoreConfig.Tigris(it.S3Options()),
    "container": lambda it: it.VirtualChunkContainer("file:///data/", it.http_store()),
    "attribution": lambda it: it.Attribution(client="weather/1.0", workload="nightly"),
    "status": lambda it: it.RepoStatus(it.RepoAvailability.read_only, WHEN, "moving"),
    "versions": lambda it: [it.SpecVersion.v1, it.ChunkType.virtual, it.SessionMode.readonly],
    "conflict": lambda it: it.Conflict(it.ConflictType.ChunkDoubleUpdate, "/a", [[1, 2]]),
    "conflict type": lambda it: it.ConflictType.ZarrMetadataUpdateOfDeletedArray,
    "selection": lambda it: it.VersionSelection.UseTheirs,
}


@pytest.mark.parametrize("make", SECTIONS.values(), ids=SECTIONS)
def test_values_are_displayed_alike(make: Callable[[Any], object]) -> None:
    """As an expression and as text; what is not set with its default."""
    made = alike(make)
    if hasattr(made, "_repr_html_"):
        assert type(made).__name__ in made._repr_html_()


@pytest.mark.parametrize("package", [icechunk, facade], ids=["theirs", "ours"])
def test_a_configuration_is_changed_in_place_and_shared(package: Any) -> None:
    """A section that was assigned is the section, on both sides; unknown fields are refused."""
    settings = package.StorageSettings()
    config = package.RepositoryConfig(storage=settings)
    settings.storage_class = "COLD"
    config.storage.retries = package.StorageRetriesSettings(3)
    config.storage.retries.max_tries = 9
    assert (config.storage.storage_class, config.storage.retries.max_tries) == ("COLD", 9)
    config.storage = None
    assert config.storage is None
    with pytest.raises(AttributeError):
        config.stored = settings


@pytest.mark.parametrize("package", [icechunk, facade], ids=["theirs", "ours"])
def test_containers_are_kept_by_prefix_and_replaced_by_name(package: Any) -> None:
    """A container takes the place of one with its prefix, and of one with its name."""
    config = package.RepositoryConfig()
    make, s3 = package.VirtualChunkContainer, package.s3_store
    config.set_virtual_chunk_container(make("s3://a/", s3()))
    config.set_virtual_chunk_container(make("s3://a/", s3(region="x"), "name"))
    assert config.get_virtual_chunk_container("s3://a/").name == "name"
    config.set_virtual_chunk_container(make("s3://b/", s3(), "name"))
    assert list(config.virtual_chunk_containers) == ["s3://b/"]
    assert config.get_virtual_chunk_container("name") is None
    config.clear_virtual_chunk_containers()
    assert config.virtual_chunk_containers == {}


def test_one_configuration_is_laid_over_another_alike() -> None:
    """Field by field down to the smallest section; what is set in the second wins."""

    def merged(package: Any) -> Any:
        first = package.RepositoryConfig(5, 6, compression=package.CompressionConfig(level=1))
        second = package.RepositoryConfig(7, caching=package.CachingConfig(1))
        second.compression = package.CompressionConfig(package.CompressionAlgorithm.Zstd)
        return first.merge(second).merge(config_of(package))

    alike(merged)


def test_values_compare_alike() -> None:
    """By value where the official ones do, and unequal values differ."""
    conditions = both(lambda it: it.ManifestPreloadCondition)
    for condition in conditions:
        assert condition.true() & condition.false() == condition.and_conditions(
            [condition.true(), condition.false()]
        )
        assert condition.path_matches("a") | condition.name_matches("a") != condition.true()
    for package in (icechunk, facade):
        assert package.RepositoryConfig() == package.RepositoryConfig.default()
        assert config_of(package) == config_of(package) != package.RepositoryConfig()
        assert package.s3_store() == package.s3_store() != package.s3_store(region="x")
        made = package.UpdateType.BranchCreated("x")
        assert made == package.UpdateType.BranchCreated("x") != package.UpdateType.GCRan()
        with pytest.raises(TypeError):
            hash(package.RepositoryConfig())


def test_conditions_are_displayed_and_taken_apart_alike() -> None:
    """As the call that makes them; their kinds can be matched."""
    alike(lambda it: it.ManifestPreloadCondition.or_conditions([]))
    alike(lambda it: it.ManifestPreloadCondition.num_refs(1, None))
    alike(
        lambda it: (
            it.ManifestSplitCondition.path_matches("a") & it.ManifestSplitCondition.AnyArray()
        )
    )
    alike(lambda it: it.ManifestSplitDimCondition.DimensionName("x"))
    for package in (icechunk, facade):
        condition = package.ManifestSplitCondition.path_matches("a")
        assert isinstance(condition, package.ManifestSplitCondition.PathMatches)
        assert condition.regex == "a"
        axis = package.ManifestSplitDimCondition.Axis(3)
        assert (axis[0], len(axis)) == (3, 1)
        assert isinstance(axis, package.ManifestSplitDimCondition)
        splitting = package.ManifestSplittingConfig.from_dict({condition: {axis: 2}})
        assert [list(sizes.values()) for sizes in splitting.to_dict().values()] == [[2]]


def call(name: str) -> Callable[[Any], object]:
    """Return a function that calls a name of a package without arguments."""
    return lambda package: getattr(package, name)()


def _attributed(labels: dict[str, str], package: Any) -> Any:
    return package.Attribution(**labels)


def test_what_cannot_be_set_is_refused_alike() -> None:
    """With the same built-in errors, at the assignment."""
    message = failing_alike(lambda it: it.CompressionConfig(level=300))
    assert message == "CompressionConfig.level is 300; allowed: an integer from 0 to 255, or None."
    failing_alike(lambda it: it.StorageRetriesSettings(0))
    failing_alike(lambda it: it.RepositoryConfig(inline_chunk_threshold_bytes="many"))
    failing_alike(lambda it: it.CompressionConfig(algorithm="zstd"))
    failing_alike(lambda it: it.RepositoryConfig(virtual_chunk_containers=[]))
    failing_alike(lambda it: it.ManifestSplittingConfig(5))
    failing_alike(lambda it: it.Attribution(client="two words"))
    for label in ("a;b", "a=b", "(a", "a)", "a\\b", 'a"b', "a\tb", "ü", "a" * 129):
        for name in ("workload", "principal"):
            labels = {name: label}
            failing_alike(partial(_attributed, labels))
    failing_alike(lambda it: it.Conflict("none", "/a"))
    failing_alike(lambda it: it.VirtualChunkSpec([0], "s3://a/b", 0, 1, None, datetime(2020, 1, 1)))
    for make in ("ObjectStoreConfig", "Storage", "ManifestPreloadCondition", "ConflictSolver"):
        failing_alike(call(make))
    for prefix in ("s3://a", "gs://a/", "nonsense/"):

        def refused(it: Any, prefix: str = prefix) -> None:
            container = it.VirtualChunkContainer(prefix, it.s3_store())
            it.RepositoryConfig().set_virtual_chunk_container(container)

        failing_alike(refused)


def test_a_configuration_travels_and_converts_both_ways() -> None:
    """It pickles and copies, which the official one does not, and is the engine's and back."""
    config = config_of(facade)
    assert pickle.loads(pickle.dumps(config)) == config
    assert copy.deepcopy(config) == config
    assert facade.RepositoryConfig.from_native(config.to_native()) == config
    stored = native.RepositoryConfig(previous_file="config.yaml.old")
    kept = facade.RepositoryConfig.from_native(stored)
    assert kept.previous_file == "config.yaml.old"
    assert kept.to_native() == stored


def test_choices_are_numbers_as_the_official_ones_are() -> None:
    """Their numbers, and comparison with numbers where the official ones have it."""
    for package in (icechunk, facade):
        assert [int(getattr(package.ChunkType, n)) for n in ("uninitialized", "inline")] == [0, 3]
        assert package.SpecVersion.v1 < package.SpecVersion.current() == 2
        assert package.ConflictType(6) == package.ConflictType.ChunkDoubleUpdate
        assert int(package.RepoAvailability.read_only) == 1
        assert [int(it) for it in package.supported_spec_versions()] == [2, 1]
        assert int(package.spec_version()) == 2
        assert int(package.CompressionAlgorithm.default()) == 0
    for choice in (facade.SpecVersion.v2, facade.ChunkType.native, facade.VersionSelection.Fail):
        assert pickle.loads(pickle.dumps(choice)) is choice


def test_updates_say_what_was_done_alike() -> None:
    """Each kind, with its particulars."""
    alike(lambda it: it.UpdateType.CommitAmended("main", "a", "b"))
    alike(lambda it: it.UpdateType.RepoMigrated(1, 2))
    alike(lambda it: it.UpdateType.FeatureFlagChanged(1, None))
    for package in (icechunk, facade):
        update = package.UpdateType.TagDeleted("v1", "id")
        assert isinstance(update, package.UpdateType)
        assert update.__match_args__ == ("name", "previous_snap_id")
        assert (update.name, update.previous_snap_id) == ("v1", "id")


def test_virtual_references_and_commit_methods() -> None:
    """The fields are there under the same names, and the types as well."""
    for package in (icechunk, facade):
        spec = package.VirtualChunkSpec([1, 2], "s3://a/b", 3, 4, None, WHEN)
        assert (spec.index, spec.location, spec.offset, spec.length) == ([1, 2], "s3://a/b", 3, 4)
        assert (spec.etag_checksum, spec.last_updated_at_checksum) == (None, WHEN)
    assert facade.CommitMethod == icechunk.CommitMethod
    spec = facade.VirtualChunkSpec([0], "s3://a/b", 0, 1)
    assert pickle.loads(pickle.dumps(spec)) == spec


@pytest.mark.parametrize("spec", [1, 2])
def test_a_repository_is_displayed_alike_with_its_format(spec: int) -> None:
    """Not after it was closed, or before it was opened: showing it opens nothing."""
    repository = alike(
        lambda package: package.Repository.create(package.in_memory_storage(), spec_version=spec)
    )
    assert repr(repository).startswith(f"<icechunk_async.sync.Repository (v{spec})>\n")
    assert f"sync.Repository (v{spec})<" in repository._repr_html_()
    repository.close()
    assert repr(repository).startswith("<icechunk_async.sync.Repository>\n")


def test_dictionaries_of_splitting_have_types() -> None:
    """For annotations of programs that make them."""
    for name in ("ManifestSplitValues", "SplitSizesDict"):
        assert hasattr(icechunk.config, name)
        assert getattr(facade.config, name).__name__ == name
