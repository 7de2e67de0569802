"""Configuration and metadata against the official engine, in both directions."""

from __future__ import annotations

import random
import string
import struct
import subprocess
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest
import zstandard
from hypothesis import given

from icechunk_async.format.config import (
    HttpStore,
    LocalFileSystemStore,
    ManifestConfig,
    ManifestPreloadCondition,
    ManifestPreloadConfig,
    ManifestSplitCondition,
    ManifestSplitDimCondition,
    ManifestSplittingConfig,
    RepositoryConfig,
    S3CompatibleStore,
    S3Options,
    VirtualChunkContainer,
    merge,
)
from icechunk_async.format.config.codec import (
    decode_config,
    encode_config,
    splitting_from_json,
    splitting_to_json,
)
from icechunk_async.format.json.metadata import decode_value, encode_value
from tests.helpers import examples
from tests.unit.format.config_samples import EVERYTHING, configs
from tests.unit.format.test_metadata import OFFICIAL_BYTES

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

icechunk = pytest.importorskip("icechunk", reason="the official wheel is not installed")

HEADER_BYTES = 39
METADATA_SLOT, CONFIG_SLOT = 5, 9
SPECS = pytest.mark.parametrize("spec", [1, 2])


@pytest.fixture(autouse=True, scope="module")
def _quiet() -> Iterator[None]:
    """Keep the engine's warnings about local disks out of the report."""
    icechunk.set_logs_filter("error")
    yield
    icechunk.set_logs_filter("warn")


# Just enough of FlatBuffers to find a vector of bytes in a table.


def payload_of(path: Path) -> bytearray:
    """The FlatBuffer in a metadata file."""
    frame = path.read_bytes()[HEADER_BYTES:]
    return bytearray(zstandard.ZstdDecompressor().decompressobj().decompress(frame))


def number(data: bytearray, at: int, code: str = "<I") -> int:
    """One number at a place."""
    (value,) = struct.unpack_from(code, data, at)
    return int(value)


def field_at(data: bytearray, table: int, slot: int) -> int | None:
    """Where a table keeps the field of this slot."""
    vtable = table - number(data, table, "<i")
    if 4 + 2 * slot >= number(data, vtable, "<H"):
        return None
    place = number(data, vtable + 4 + 2 * slot, "<H")
    return table + place if place else None


def bytes_at(data: bytearray, table: int, slot: int) -> bytes:
    """The vector of bytes, or the string, in this slot."""
    field = field_at(data, table, slot)
    assert field is not None
    vector = field + number(data, field)
    return bytes(data[vector + 4 : vector + 4 + number(data, vector)])


def stored_metadata(repository: Path, name: str) -> dict[str, bytes]:
    """The metadata items of the snapshot that has an item of this name."""
    for path in (repository / "snapshots").iterdir():
        data = payload_of(path)
        field = field_at(data, number(data, 0), METADATA_SLOT)
        assert field is not None
        vector = field + number(data, field)
        places = [vector + 4 + 4 * place for place in range(number(data, vector))]
        tables = [place + number(data, place) for place in places]
        items = {bytes_at(data, table, 0).decode(): bytes_at(data, table, 1) for table in tables}
        if name in items:
            return items
    raise AssertionError(name)


def stored_config(repository: Path, spec: int) -> bytes:
    """The bytes of the persisted configuration."""
    if spec == 1:
        return (repository / "config.yaml").read_bytes()
    data = payload_of(repository / "repo")
    return bytes_at(data, number(data, 0), CONFIG_SLOT)


def replace_config(repository: Path, spec: int, config: bytes) -> None:
    """Put other bytes in place of the persisted configuration."""
    if spec == 1:
        (repository / "config.yaml").write_bytes(config)
        return
    path = repository / "repo"
    data = payload_of(path)
    field = field_at(data, number(data, 0), CONFIG_SLOT)
    assert field is not None
    data += bytes(-len(data) % 4)
    struct.pack_into("<I", data, field, len(data) - field)
    data += struct.pack("<I", len(config)) + config
    frame = zstandard.ZstdCompressor().compress(bytes(data))
    path.write_bytes(path.read_bytes()[:HEADER_BYTES] + frame)


# The official side.


def create(repository: Path, spec: int, config: Any = None) -> Any:
    """Create a repository with the official engine."""
    storage = icechunk.local_filesystem_storage(str(repository))
    return icechunk.Repository.create(storage, spec_version=spec, config=config)


def official_reading(repository: Path) -> Any:
    """The persisted configuration as the official engine reads it."""
    return icechunk.Repository.fetch_config(icechunk.local_filesystem_storage(str(repository)))


def official_writing(directory: Path, config: Any, spec: int) -> bytes:
    """The bytes that the official engine persists for a configuration."""
    create(directory, spec, config)
    return stored_config(directory, spec)


def official_full_config(*, containers: bool) -> Any:
    """An official configuration with every field set."""
    split, dim = icechunk.ManifestSplitCondition, icechunk.ManifestSplitDimCondition
    preload, settings = icechunk.ManifestPreloadCondition, icechunk.storage
    config = icechunk.RepositoryConfig(
        inline_chunk_threshold_bytes=77,
        get_partial_values_concurrency=5,
        compression=icechunk.CompressionConfig(icechunk.CompressionAlgorithm.Zstd, 7),
        max_concurrent_requests=9,
        caching=icechunk.CachingConfig(1, 2, 3, 4, 5),
        storage=icechunk.StorageSettings(
            settings.StorageConcurrencySettings(3, 400),
            settings.StorageRetriesSettings(4, 5, 6),
            unsafe_use_conditional_create=True,
            unsafe_use_conditional_update=False,
            unsafe_use_metadata=False,
            storage_class="yes",
            minimum_size_for_multipart_upload=123_456_789,
            timeouts=settings.StorageTimeoutSettings(1, 2, 3, 4),
        ),
        manifest=icechunk.ManifestConfig(
            icechunk.ManifestPreloadConfig(
                10,
                preload.or_conditions([preload.path_matches("^/a: #"), preload.num_refs(1, 10)])
                & preload.or_conditions([preload.num_refs(None, None), preload.true()])
                & preload.false(),
                7,
            ),
            icechunk.ManifestSplittingConfig.from_dict(
                {
                    split.or_conditions([split.name_matches("y"), split.AnyArray()])
                    & split.path_matches("x"): {
                        dim.Axis(0): 3,
                        dim.DimensionName("lon"): 4,
                        dim.Any(): 5,
                    },
                    split.AnyArray(): {dim.Any(): 2**32 - 1},
                }
            ),
            icechunk.config.ManifestVirtualChunkLocationCompressionConfig(
                5,
                dictionary_max_training_samples=6,
                dictionary_max_size_bytes=7,
                compression_level=8,
            ),
            3,
        ),
        num_updates_per_repo_info_file=12,
        max_concurrent_decodes=8,
    )
    if containers:
        for container in official_containers():
            config.set_virtual_chunk_container(container)
    return config


def official_containers() -> list[Any]:
    """One container of each kind of store."""
    container, store = icechunk.VirtualChunkContainer, icechunk.ObjectStoreConfig
    full = icechunk.S3Options(
        endpoint_url="http://x:9",
        allow_http=True,
        anonymous=True,
        force_path_style=True,
        network_stream_timeout_seconds=6,
        requester_pays=True,
    )
    return [
        container("s3://bucket/p/", icechunk.s3_store(region="us-east-1"), "n1"),
        container("s3://bucket/q/", store.S3Compatible(full)),
        container("tigris://bucket/", store.Tigris(icechunk.S3Options())),
        container("gs://bucket/", store.Gcs({"a": "b"}), "é"),
        container("az://c/", store.Azure({"account": "acc"})),
        container("https://example.com/d/", icechunk.http_store({"timeout": "5s"}, {"h": "v"})),
        container("http://example.com/", icechunk.http_store()),
        container("file:///tmp/x y/", store.LocalFileSystem("/tmp/x y")),  # noqa: S108
    ]


# Metadata


def random_values(seed: int, count: int) -> list[Any]:
    """JSON values of many shapes: long and short vectors, wide and narrow numbers, shared keys."""
    pick = random.Random(seed)
    keys = [*string.ascii_lowercase, "é", "", "long " * 40, *(f"key {n}" for n in range(200))]

    def integer() -> int:
        power = 1 << pick.randrange(64)
        found = pick.choice([pick.randrange(5), power, -power])
        return max(found + pick.randrange(-1, 2), -(2**63))

    def scalar() -> Any:
        floats = [0.0, -0.0, 1.5, 0.1, 1e300, 3.4e38, 1e-45, pick.random()]
        text = pick.choice(keys) * pick.choice([0, 1, 1, 1000])
        return pick.choice([None, True, False, integer(), pick.choice(floats), text])

    def value(depth: int) -> Any:
        kind = pick.randrange(8) if depth else 0
        length = pick.choice([0, 1, 2, 3, 4, 5, 20, 300])
        match kind:
            case 1:
                return [abs(integer()) for _ in range(length)]
            case 2:
                return [-abs(integer()) - 1 if length < 9 else integer() for _ in range(length)]
            case 3:
                return [pick.choice([1.5, 2.25, 0.1, -1e300]) for _ in range(length)]
            case 4:
                return [pick.random() < 0.5 for _ in range(length)]
            case 5:
                return [value(depth - 1) for _ in range(min(length, 5))]
            case 6 | 7:
                chosen = pick.sample(keys, min(length, len(keys)) if depth < 3 else 3)
                return {key: value(depth - 1) for key in chosen}
            case _:
                return scalar()

    return [within_64_bits(value(4)) for _ in range(count)]


def within_64_bits(value: Any) -> Any:
    """The value with integers brought into the range that can be stored."""
    match value:
        case bool():
            return value
        case int():
            return max(-(2**63), min(value, 2**64 - 1))
        case list():
            return [within_64_bits(item) for item in value]
        case dict():
            return {key: within_64_bits(item) for key, item in value.items()}
        case _:
            return value


@SPECS
def test_metadata_of_official_commits_has_the_bytes_that_we_write(
    spec: int, tmp_path: Path
) -> None:
    """Hundreds of values of all shapes: equal bytes, and they decode to what was committed."""
    values = [value for value, _, _ in OFFICIAL_BYTES] + random_values(1, 400)
    metadata = {f"item {place}": value for place, value in enumerate(values)}
    session = create(tmp_path, spec).writable_session("main")
    session.commit("metadata", metadata=metadata, allow_empty=True)
    stored = stored_metadata(tmp_path, "item 0")
    for name, value in metadata.items():
        assert stored[name] == encode_value(value, spec), name
        assert decode_value(stored[name], spec) == value, name


@SPECS
def test_the_root_is_marked_in_metadata(spec: int, tmp_path: Path) -> None:
    """The property that the engine itself writes is read and written alike."""
    create(tmp_path, spec)
    stored = stored_metadata(tmp_path, "__icechunk")["__icechunk"]
    assert decode_value(stored, spec) == {"is_root": True}
    assert encode_value({"is_root": True}, spec) == stored


@SPECS
@pytest.mark.parametrize("rules_are", ["configured", "default"])
def test_rewritten_manifests_record_the_splitting_rules(
    spec: int, rules_are: str, tmp_path: Path
) -> None:
    """The property of such commits is the JSON that we make of the same rules."""
    configured = rules_are == "configured"
    config = official_full_config(containers=False) if configured else None
    repository = create(tmp_path, spec, config)
    repository.rewrite_manifests("rewrite", branch="main", metadata={"mark": 1})
    stored = stored_metadata(tmp_path, "mark")["__icechunk"]
    rules = ManifestSplittingConfig()
    if configured:
        ours = decode_config(stored_config(tmp_path, spec), spec)
        rules = ours.effective_manifest.effective_splitting
        assert rules.split_sizes is not None
    recorded = {"splitting_config": splitting_to_json(rules)}
    assert decode_value(stored, spec) == recorded
    assert encode_value(recorded, spec) == stored
    read = splitting_from_json(splitting_to_json(rules))
    assert read.split_sizes == rules.effective_split_sizes


# Configuration: theirs to ours


def test_both_official_forms_decode_to_one_configuration(tmp_path: Path) -> None:
    """Every field and every kind of store comes out of YAML and FlexBuffers alike."""
    official = official_full_config(containers=True)
    one, two = (
        decode_config(official_writing(tmp_path / str(spec), official, spec), spec)
        for spec in (1, 2)
    )
    assert one == two
    assert one.inline_chunk_threshold_bytes == 77
    assert one.caching == EVERYTHING.caching
    assert one.compression == EVERYTHING.compression
    assert one.storage is not None
    assert one.storage.storage_class == "yes"
    assert one.storage.timeouts == EVERYTHING.effective_storage.timeouts
    containers = {item.url_prefix: item for item in one.effective_virtual_chunk_containers}
    assert containers["s3://bucket/q/"].store == S3CompatibleStore(
        S3Options(None, "http://x:9", True, True, True, 6, True)  # noqa: FBT003
    )
    assert containers["gs://bucket/"].name == "é"
    assert containers["https://example.com/d/"].store == HttpStore({"timeout": "5s"}, {"h": "v"})
    assert containers["file:///tmp/x y/"].store == LocalFileSystemStore("/tmp/x y")  # noqa: S108
    assert len(containers) == 8
    preload, split = ManifestPreloadCondition, ManifestSplitCondition
    dim = ManifestSplitDimCondition
    manifest = one.effective_manifest
    assert manifest.preload == ManifestPreloadConfig(
        10,
        preload.and_conditions(
            [
                (preload.path_matches("^/a: #") | preload.num_refs(1, 10))
                & (preload.num_refs(None, None) | preload.true()),
                preload.false(),
            ]
        ),
        7,
    )
    assert manifest.effective_splitting.to_dict() == {
        (split.name_matches("y") | split.any_array()) & split.path_matches("x"): {
            dim.Axis(0): 3,
            dim.DimensionName("lon"): 4,
            dim.Any(): 5,
        },
        split.any_array(): {dim.Any(): 2**32 - 1},
    }


def test_our_flexbuffers_are_the_official_bytes(tmp_path: Path) -> None:
    """To the byte, with one container at most: the engine writes several in random order."""
    official: list[Any] = [
        official_full_config(containers=False),
        icechunk.RepositoryConfig(max_concurrent_requests=1),
        icechunk.RepositoryConfig(virtual_chunk_containers={}),
    ]
    for container in official_containers():
        config = icechunk.RepositoryConfig()
        config.set_virtual_chunk_container(container)
        official.append(config)
    for place, config in enumerate(official):
        stored = official_writing(tmp_path / str(place), config, 2)
        assert encode_config(decode_config(stored, 2), 2) == stored


def test_our_yaml_has_the_official_lines(tmp_path: Path) -> None:
    """Line by line, but for quotes around text that other readers might take for a number."""
    stored = official_writing(tmp_path, official_full_config(containers=False), 1).decode()
    ours = encode_config(decode_config(stored.encode(), 1), 1).decode()
    assert ours.replace("'", "").splitlines() == stored.replace("'", "").splitlines()


# Configuration: ours to theirs


@SPECS
def test_the_official_engine_reads_what_we_write(spec: int, tmp_path: Path) -> None:
    """Its own configuration, through our hands, is equal to the original in its eyes."""
    official = official_full_config(containers=True)
    stored = official_writing(tmp_path, official, spec)
    before = official_reading(tmp_path)
    replace_config(tmp_path, spec, encode_config(decode_config(stored, spec), spec))
    assert official_reading(tmp_path) == before
    icechunk.Repository.open(icechunk.local_filesystem_storage(str(tmp_path)))


@examples(80)
@given(config=configs())
def test_any_configuration_passes_through_the_official_engine(
    config: RepositoryConfig, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """We write both forms, it reads them as equal and writes them, we read the same again.

    Left out on its writing: what it applies to the new repository at once, where some values
    fail on a local disk, and where no requests at a time make it wait for ever.
    """
    readings: list[Any] = []
    applied = replace(config, storage=None, max_concurrent_requests=None)
    applied = replace(applied, max_concurrent_decodes=None, previous_file="set")
    for spec in (1, 2):
        root = tmp_path_factory.mktemp("any")
        unset = official_writing(root, icechunk.RepositoryConfig(max_concurrent_requests=1), spec)
        replace_config(root, spec, encode_config(config, spec))
        readings.append(official_reading(root))
        replace_config(root, spec, encode_config(applied, spec))
        written = official_writing(root / "again", official_reading(root), 3 - spec)
        defaults = RepositoryConfig(storage=decode_config(unset, spec).storage)
        assert decode_config(written, 3 - spec) == merge(defaults, applied)
    assert readings[0] == readings[1]


# The first major version, in a separate process

SCRIPT_READ = """
import sys, icechunk
source, target = sys.argv[1:]
storage = icechunk.local_filesystem_storage
config = icechunk.Repository.fetch_config(storage(source))
icechunk.Repository.create(storage(target), config=config)
"""
SCRIPT_WRITE = """
import sys, icechunk as ic
split, dim = ic.ManifestSplitCondition, ic.ManifestSplitDimCondition
preload = ic.ManifestPreloadCondition
config = ic.RepositoryConfig(
    inline_chunk_threshold_bytes=12,
    compression=ic.CompressionConfig(level=4),
    caching=ic.CachingConfig(1, 2, 3, 4, 5),
    manifest=ic.ManifestConfig(
        preload=ic.ManifestPreloadConfig(
            max_total_refs=3, preload_if=preload.name_matches("t") & preload.num_refs(1, 2)
        ),
        splitting=ic.ManifestSplittingConfig.from_dict(
            {split.name_matches("a") | split.path_matches("b"): {dim.Axis(1): 2, dim.Any(): 3}}
        ),
    ),
)
store = ic.s3_store("us-east-1", endpoint_url="http://x", allow_http=True, s3_compatible=True)
config.set_virtual_chunk_container(ic.VirtualChunkContainer("s3://bucket/p/", store))
ic.Repository.create(ic.local_filesystem_storage(sys.argv[1]), config=config)
"""


def run(interpreter: str, script: str, *arguments: Path) -> None:
    """Run a script in the other interpreter."""
    command = [interpreter, "-c", script, *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, encoding="utf-8", timeout=240, check=False)
    assert done.returncode == 0, done.stderr


def test_configurations_of_the_first_major_are_read(python_of_wheel_1: str, tmp_path: Path) -> None:
    """Every setting that 1.x persists is read."""
    run(python_of_wheel_1, SCRIPT_WRITE, tmp_path)
    config = decode_config(stored_config(tmp_path, 1), 1)
    assert config.inline_chunk_threshold_bytes == 12
    assert config.effective_compression.effective_level == 4
    assert config.caching == EVERYTHING.caching
    preload, split = ManifestPreloadCondition, ManifestSplitCondition
    dim = ManifestSplitDimCondition
    assert config.manifest == ManifestConfig(
        ManifestPreloadConfig(3, preload.name_matches("t") & preload.num_refs(1, 2)),
        ManifestSplittingConfig.from_dict(
            {split.name_matches("a") | split.path_matches("b"): {dim.Axis(1): 2, dim.Any(): 3}}
        ),
    )
    (container,) = config.effective_virtual_chunk_containers
    assert container.url_prefix == "s3://bucket/p/"
    assert isinstance(container.store, S3CompatibleStore)
    assert container.store.options.endpoint_url == "http://x"


def test_the_first_major_reads_what_we_write(python_of_wheel_1: str, tmp_path: Path) -> None:
    """It drops what it does not know, and keeps the rest."""
    ours, theirs = tmp_path / "ours", tmp_path / "theirs"
    create(ours, 1)
    container = VirtualChunkContainer("s3://bucket/p/", S3CompatibleStore(S3Options("r")), "n")
    config = RepositoryConfig(
        inline_chunk_threshold_bytes=EVERYTHING.inline_chunk_threshold_bytes,
        compression=EVERYTHING.compression,
        caching=EVERYTHING.caching,
        storage=EVERYTHING.storage,
        virtual_chunk_containers=(container,),
        manifest=EVERYTHING.manifest,
        num_updates_per_repo_info_file=3,
    )
    replace_config(ours, 1, encode_config(config, 1))
    run(python_of_wheel_1, SCRIPT_READ, ours, theirs)
    back = decode_config(stored_config(theirs, 1), 1)
    assert back.inline_chunk_threshold_bytes == config.inline_chunk_threshold_bytes
    assert back.compression == config.compression
    assert back.caching == config.caching
    assert back.num_updates_per_repo_info_file is None
    assert back.effective_storage.retries == config.effective_storage.retries
    preload = config.effective_manifest.preload
    assert preload is not None
    assert back.effective_manifest.preload == replace(preload, max_arrays_to_scan=None)
    assert back.effective_manifest.splitting == config.effective_manifest.splitting
    (read,) = back.effective_virtual_chunk_containers
    assert (read.url_prefix, read.store) == (container.url_prefix, container.store)
