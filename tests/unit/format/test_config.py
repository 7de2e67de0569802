"""The configuration as values: defaults, validation, merging, conditions."""

from __future__ import annotations

import pickle
from dataclasses import FrozenInstanceError, replace
from typing import Any

import pytest

from icechunk_async.errors import (
    InvalidConfigError,
)
from icechunk_async.format.config import (
    DEFAULT_PRELOAD_CONDITION,
    AzureStore,
    CachingConfig,
    CompressionAlgorithm,
    CompressionConfig,
    GcsStore,
    HttpStore,
    InMemoryStore,
    LocalFileSystemStore,
    ManifestConfig,
    ManifestPreloadCondition,
    ManifestPreloadConfig,
    ManifestSplitCondition,
    ManifestSplitDimCondition,
    ManifestSplittingConfig,
    ManifestVirtualChunkLocationCompressionConfig,
    ObjectStoreConfig,
    RepositoryConfig,
    RepoUpdateRetryConfig,
    S3CompatibleStore,
    S3Options,
    S3Store,
    StorageConcurrencySettings,
    StorageRetriesSettings,
    StorageSettings,
    StorageTimeoutSettings,
    TigrisStore,
    VirtualChunkContainer,
    merge,
)

Preload = ManifestPreloadCondition
Split = ManifestSplitCondition
Dim = ManifestSplitDimCondition

SOME = RepositoryConfig(
    inline_chunk_threshold_bytes=77,
    storage=StorageSettings(retries=StorageRetriesSettings(4, 5, 6)),
    virtual_chunk_containers=(
        VirtualChunkContainer("gs://bucket/p/", GcsStore({"a": "b"}), "n1"),
        VirtualChunkContainer("https://host/", HttpStore({"timeout": "5s"}, {"a": "b"})),
    ),
    manifest=ManifestConfig(
        ManifestPreloadConfig(10, Preload.path_matches("^/a") | Preload.num_refs(1, None)),
        ManifestSplittingConfig.from_dict(
            {
                Split.path_matches("x") & Split.any_array(): {Dim.Axis(0): 3, Dim.Any(): 5},
                Split.any_array(): {Dim.DimensionName("lon"): 2**32 - 1},
            }
        ),
    ),
    max_concurrent_decodes=8,
)


# Defaults


def test_defaults_are_the_official_ones() -> None:
    """Unset fields answer the documented values, through all sections."""
    config = RepositoryConfig()
    storage, manifest = config.effective_storage, config.effective_manifest
    caching, locations = (
        config.effective_caching,
        manifest.effective_virtual_chunk_location_compression,
    )
    retries, updates = storage.effective_retries, config.effective_repo_update_retries
    assert config.effective_inline_chunk_threshold_bytes == 512
    assert config.effective_get_partial_values_concurrency == 10
    assert config.effective_max_concurrent_requests == 256
    assert config.effective_max_concurrent_decodes >= 1
    assert config.effective_num_updates_per_repo_info_file == 1000
    assert config.effective_virtual_chunk_containers == ()
    assert config.effective_compression.effective_algorithm is CompressionAlgorithm.Zstd
    assert config.effective_compression.effective_level == 3
    assert caching.effective_num_snapshot_nodes == 500_000
    assert caching.effective_num_chunk_refs == 15_000_000
    assert caching.effective_num_transaction_changes == 0
    assert caching.effective_num_bytes_attributes == 0
    assert caching.effective_num_bytes_chunks == 0
    assert storage.effective_concurrency.effective_max_concurrent_requests_for_object == 18
    assert storage.effective_concurrency.effective_ideal_concurrent_request_size == 12 * 1024**2
    assert storage.effective_unsafe_use_conditional_create is True
    assert storage.effective_unsafe_use_conditional_update is True
    assert storage.effective_unsafe_use_metadata is True
    assert storage.effective_minimum_size_for_multipart_upload == 100 * 1024**2
    assert storage.effective_timeouts == StorageTimeoutSettings()
    assert retries.effective_max_tries == 10
    assert retries.effective_initial_backoff_ms == 100
    assert retries.effective_max_backoff_ms == 180_000
    assert updates.effective_default == StorageRetriesSettings(100, 50, 30_000)
    assert manifest.effective_max_concurrent_manifest_fetches_during_commit == 1
    assert manifest.effective_preload.effective_max_total_refs == 10_000
    assert manifest.effective_preload.effective_max_arrays_to_scan == 50
    assert manifest.effective_preload.effective_preload_if is DEFAULT_PRELOAD_CONDITION
    assert locations.effective_min_num_chunks == 1000
    assert locations.effective_dictionary_max_training_samples == 100
    assert locations.effective_dictionary_max_size_bytes == 2048
    assert locations.effective_compression_level == 3
    ((arrays, sizes),) = manifest.effective_splitting.effective_split_sizes
    assert arrays.matches("/")
    assert sizes == ((Dim.Any(), 2**32 - 1),)


def test_set_values_win_over_defaults() -> None:
    """A set value is returned. None within a section stands for its default."""
    assert SOME.effective_inline_chunk_threshold_bytes == 77
    assert SOME.effective_max_concurrent_decodes == 8
    retries = RepoUpdateRetryConfig(StorageRetriesSettings(initial_backoff_ms=1))
    assert retries.effective_default == StorageRetriesSettings(100, 1, 30_000)
    assert StorageSettings(unsafe_use_metadata=False).effective_unsafe_use_metadata is False


def test_storage_classes_fall_back_to_the_general_one() -> None:
    """The class for chunks or metadata counts first, then that for all."""
    settings = StorageSettings(storage_class="A", chunks_storage_class="C")
    assert settings.effective_metadata_storage_class == "A"
    assert settings.effective_chunks_storage_class == "C"
    assert StorageSettings(storage_class="A").effective_chunks_storage_class == "A"
    assert StorageSettings().effective_chunks_storage_class is None


def test_legal_values_without_meaning_are_adjusted() -> None:
    """The stored form permits no workers and levels that zstd has not."""
    config = RepositoryConfig(
        max_concurrent_requests=0,
        get_partial_values_concurrency=0,
        max_concurrent_decodes=0,
        num_updates_per_repo_info_file=0,
        manifest=ManifestConfig(max_concurrent_manifest_fetches_during_commit=0),
    )
    assert config.effective_max_concurrent_requests == 1
    assert config.effective_get_partial_values_concurrency == 1
    assert config.effective_max_concurrent_decodes == 1
    assert config.effective_num_updates_per_repo_info_file == 1
    assert config.effective_manifest.effective_max_concurrent_manifest_fetches_during_commit == 1
    assert CompressionConfig(level=255).effective_level == 22
    assert CompressionConfig(level=0).effective_level == 3
    locations = ManifestVirtualChunkLocationCompressionConfig(compression_level=-(2**31))
    assert locations.effective_compression_level == -(2**17)


def test_values_are_immutable_hashable_and_pickle() -> None:
    """They are shared between sessions and travel to other processes."""
    assert pickle.loads(pickle.dumps(SOME)) == SOME
    assert hash(SOME) == hash(replace(SOME))
    with pytest.raises(FrozenInstanceError):
        SOME.previous_file = "x"  # type: ignore[misc]
    options = {"account": "a"}
    store = AzureStore(options)
    options["account"] = "b"
    assert store.options == {"account": "a"}


# Merging


def test_merging_goes_field_by_field_down_to_the_smallest_section() -> None:
    """A field that only one side sets has that value. Otherwise the stronger side wins."""
    weaker = RepositoryConfig(
        inline_chunk_threshold_bytes=1,
        compression=CompressionConfig(level=5),
        caching=CachingConfig(1, 2),
        storage=StorageSettings(
            concurrency=StorageConcurrencySettings(3, None),
            retries=StorageRetriesSettings(4, 5, None),
            storage_class="x",
        ),
        manifest=ManifestConfig(max_concurrent_manifest_fetches_during_commit=3),
        repo_update_retries=RepoUpdateRetryConfig(StorageRetriesSettings(4, 5, None)),
    )
    stronger = RepositoryConfig(
        inline_chunk_threshold_bytes=2,
        compression=CompressionConfig(CompressionAlgorithm.Zstd),
        caching=CachingConfig(None, 3, 4),
        storage=StorageSettings(
            concurrency=StorageConcurrencySettings(None, 9),
            retries=StorageRetriesSettings(None, 6, 7),
            timeouts=StorageTimeoutSettings(8),
            unsafe_use_metadata=False,
        ),
        manifest=ManifestConfig(
            virtual_chunk_location_compression=ManifestVirtualChunkLocationCompressionConfig(9)
        ),
        repo_update_retries=RepoUpdateRetryConfig(StorageRetriesSettings(None, 6, 7)),
    )
    assert merge(weaker, stronger) == RepositoryConfig(
        inline_chunk_threshold_bytes=2,
        compression=CompressionConfig(CompressionAlgorithm.Zstd, 5),
        caching=CachingConfig(1, 3, 4),
        storage=StorageSettings(
            concurrency=StorageConcurrencySettings(3, 9),
            retries=StorageRetriesSettings(4, 6, 7),
            timeouts=StorageTimeoutSettings(8),
            unsafe_use_metadata=False,
            storage_class="x",
        ),
        manifest=ManifestConfig(
            virtual_chunk_location_compression=ManifestVirtualChunkLocationCompressionConfig(9),
            max_concurrent_manifest_fetches_during_commit=3,
        ),
        repo_update_retries=RepoUpdateRetryConfig(StorageRetriesSettings(4, 6, 7)),
    )


def test_merging_replaces_preload_splitting_and_containers_as_units() -> None:
    """A stronger section that is set leaves nothing of the weaker one."""
    rules = ManifestSplittingConfig.from_dict({Split.any_array(): {Dim.Any(): 3}})
    one = VirtualChunkContainer("s3://a/", S3Store(), "n")
    weaker = RepositoryConfig(
        manifest=ManifestConfig(ManifestPreloadConfig(max_total_refs=5), rules),
        virtual_chunk_containers=(one,),
    )
    stronger = RepositoryConfig(
        manifest=ManifestConfig(
            ManifestPreloadConfig(max_arrays_to_scan=6), ManifestSplittingConfig()
        ),
        virtual_chunk_containers=(),
    )
    assert merge(weaker, stronger) == stronger
    assert merge(weaker, RepositoryConfig()) == weaker
    assert merge(RepositoryConfig(), weaker) == weaker


# Validation

INVALID: list[tuple[type[Any], dict[str, Any], str]] = [
    (
        RepositoryConfig,
        {"inline_chunk_threshold_bytes": 65536},
        "is 65536; allowed: an integer from 0 to 65535, or None",
    ),
    (RepositoryConfig, {"inline_chunk_threshold_bytes": -1}, "is -1"),
    (RepositoryConfig, {"inline_chunk_threshold_bytes": "512"}, "is '512'"),
    (RepositoryConfig, {"inline_chunk_threshold_bytes": 512.0}, "is 512.0"),
    (RepositoryConfig, {"inline_chunk_threshold_bytes": True}, "is True"),
    (RepositoryConfig, {"max_concurrent_requests": 70_000}, "0 to 65535"),
    (RepositoryConfig, {"compression": 3}, "an instance of CompressionConfig, or None"),
    (RepositoryConfig, {"storage": {}}, "is of type dict"),
    (RepositoryConfig, {"previous_file": 3}, "text, or None"),
    (RepositoryConfig, {"previous_file": "\ud800"}, "text that has a UTF-8 form"),
    (RepositoryConfig, {"virtual_chunk_containers": []}, "a tuple of VirtualChunkContainer"),
    (RepositoryConfig, {"virtual_chunk_containers": ("s3://a/",)}, "holds a str"),
    (CompressionConfig, {"level": 256}, "0 to 255"),
    (CompressionConfig, {"algorithm": "lz4"}, "CompressionAlgorithm, or None"),
    (CachingConfig, {"num_chunk_refs": 2**64}, "0 to 18446744073709551615"),
    (StorageConcurrencySettings, {"max_concurrent_requests_for_object": 0}, "1 to 65535"),
    (StorageConcurrencySettings, {"ideal_concurrent_request_size": 0}, "from 1 to"),
    (StorageRetriesSettings, {"max_tries": 0}, "1 to 65535"),
    (StorageRetriesSettings, {"initial_backoff_ms": 2**32}, "0 to 4294967295"),
    (StorageSettings, {"unsafe_use_metadata": 1}, "True or False, or None"),
    (StorageTimeoutSettings, {"connect_timeout_ms": 2**32}, "0 to 4294967295"),
    (ManifestPreloadConfig, {"preload_if": "true"}, "an instance of ManifestPreloadCondition"),
    (ManifestVirtualChunkLocationCompressionConfig, {"min_num_chunks": 2**16}, "0 to 65535"),
    (ManifestVirtualChunkLocationCompressionConfig, {"compression_level": 2**31}, "-2147483648"),
    (ManifestSplittingConfig, {"split_sizes": []}, "in a tuple"),
    (ManifestSplittingConfig, {"split_sizes": (1,)}, "a pair of ManifestSplitCondition"),
    (ManifestSplittingConfig, {"split_sizes": (("x", ()),)}, "must be a ManifestSplitCondition"),
    (
        ManifestSplittingConfig,
        {"split_sizes": ((Split.any_array(), (("x", 1),)),)},
        "sizes are for",
    ),
    (
        ManifestSplittingConfig,
        {"split_sizes": ((Split.any_array(), ((Dim.Any(), 0),)),)},
        "is 0; allowed: an integer from 1",
    ),
    (Dim.Axis, {"axis": -1}, "is -1"),
    (Dim.DimensionName, {"regex": 3}, "is 3; allowed: text"),
    (S3Options, {"anonymous": None}, "is None; allowed: True or False."),
    (S3Options, {"network_stream_timeout_seconds": 2**32}, "0 to 4294967295"),
    (S3Options, {"checksum_algorithm": "crc32"}, "ChecksumAlgorithm"),
    (GcsStore, {"options": {"a": 1}}, "['a'] is of type int; allowed: text"),
    (GcsStore, {"options": {"a\0": "b"}}, "NUL"),
    (HttpStore, {"options": {"headers": "b"}}, "pass headers="),
    (LocalFileSystemStore, {"path": None}, "is None"),
]


@pytest.mark.parametrize(("cls", "arguments", "message"), INVALID)
def test_invalid_values_are_refused_by_name(
    cls: type[Any], arguments: dict[str, Any], message: str
) -> None:
    """The message names the field, what was found and what is allowed."""
    with pytest.raises(InvalidConfigError) as caught:
        cls(**arguments)
    assert message in str(caught.value)
    assert next(iter(arguments)) in str(caught.value)
    assert cls.__name__ in str(caught.value)


@pytest.mark.parametrize(
    ("prefix", "store", "name", "message"),
    [
        ("s3://b", S3Store(), None, "ends in '/'"),
        ("", S3Store(), None, "ends in '/'"),
        ("s3:///x/", S3Store(), None, "with a host"),
        ("b/", S3Store(), None, "schemes of S3Store: s3://"),
        ("s3://b c/", S3Store(), None, "with a host"),
        ("s3://b/\n/", S3Store(), None, "printable"),
        ("http://[/", HttpStore(), None, "no URL"),
        ("gs://b/", S3Store(), None, "schemes of S3Store: s3://"),
        ("tigris://b/", S3CompatibleStore(), None, "schemes of S3CompatibleStore"),
        ("gs://b/", TigrisStore(), None, "s3://, tigris://"),
        ("abfss://b/", AzureStore({"account": "x"}), None, "schemes of AzureStore"),
        ("az://b/", AzureStore(), None, "without account"),
        ("vcc://b/", S3Store(), None, "schemes"),
        ("memory://b/", InMemoryStore(), None, "schemes of InMemoryStore: none"),
        ("file:///", LocalFileSystemStore("/"), None, "with a path"),
        ("http:///", HttpStore(), None, "with a host"),
        ("s3://b/", S3Store(), "", "not empty"),
        ("s3://b/", S3Store(), "a/b", "without '/'"),
        ("s3://b/", "s3", None, "one of the stores"),
        (3, S3Store(), None, "is 3"),
    ],
)
def test_containers_that_cannot_serve_are_refused(
    prefix: Any, store: Any, name: str | None, message: str
) -> None:
    """Prefix, scheme, host and name follow the rules of containers."""
    with pytest.raises(InvalidConfigError, match="VirtualChunkContainer") as caught:
        VirtualChunkContainer(prefix, store, name)
    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("prefix", "store"),
    [
        ("s3://b/", S3Store()),
        ("S3://B/", S3Store()),
        ("s3://b/a//../é x/", S3CompatibleStore()),
        ("tigris://b/", TigrisStore()),
        ("s3://b/", TigrisStore()),
        ("gs://b/", GcsStore()),
        ("gcs://b/", GcsStore()),
        ("az://b/", AzureStore({"account": "x"})),
        ("azure://b/", AzureStore({"account": "x"})),
        ("abfs://b/", AzureStore({"account": "x"})),
        ("http://u:p@h:80/", HttpStore()),
        ("https://h/a/", HttpStore()),
        ("file:///a/", LocalFileSystemStore("/a")),
        ("file:/a/", LocalFileSystemStore("/a")),
    ],
)
def test_containers_that_fit_are_kept_verbatim(prefix: str, store: ObjectStoreConfig) -> None:
    """Every scheme has its stores, and the prefix is not rewritten."""
    assert VirtualChunkContainer(prefix, store).url_prefix == prefix


def test_containers_share_neither_name_nor_prefix() -> None:
    """Both identify a container; the message names the one that is taken."""
    first = VirtualChunkContainer("s3://a/", S3Store(), "n")
    with pytest.raises(InvalidConfigError, match="two with the name 'n'"):
        RepositoryConfig(
            virtual_chunk_containers=(first, VirtualChunkContainer("s3://b/", S3Store(), "n"))
        )
    with pytest.raises(InvalidConfigError, match="two with the url_prefix 's3://a/'"):
        RepositoryConfig(
            virtual_chunk_containers=(first, VirtualChunkContainer("s3://a/", S3Store()))
        )


def test_setting_a_container_replaces_its_name_and_prefix() -> None:
    """It works like the official ``set_virtual_chunk_container``, on a copy."""
    config = RepositoryConfig()
    for prefix, name in [("s3://a/", "n"), ("s3://b/", None), ("s3://c/", "n"), ("s3://b/", "m")]:
        config = config.with_virtual_chunk_container(VirtualChunkContainer(prefix, S3Store(), name))
    containers = config.effective_virtual_chunk_containers
    assert [(item.url_prefix, item.name) for item in containers] == [
        ("s3://b/", "m"),
        ("s3://c/", "n"),
    ]
    assert config.get_virtual_chunk_container("n") == containers[1]
    assert config.get_virtual_chunk_container("x") is None


def test_secrets_stay_out_of_reprs_and_messages() -> None:
    """Options, headers and credentials in URLs are not shown."""
    assert "hush" not in repr(HttpStore({"token": "hush"}, {"authorization": "hush"}))
    assert "hush" not in repr(GcsStore({"token": "hush"}))
    with pytest.raises(InvalidConfigError) as caught:
        VirtualChunkContainer("http://me:hush@host", HttpStore())
    assert "hush" not in str(caught.value)


# Conditions


def test_array_conditions_search_paths_and_names() -> None:
    """Unanchored, on the absolute path or its last segment; the root has no name."""
    assert Split.any_array().matches("/")
    assert Split.AnyArray() == Split.any_array()
    assert Split.path_matches("b/c").matches("/a/b/c/d")
    assert not Split.path_matches("^b").matches("/b")
    assert Split.name_matches("^d$").matches("/a/b/d")
    assert not Split.name_matches("a").matches("/a/b/d")
    assert not Split.name_matches(".*").matches("/")
    both = Split.path_matches("a") & Split.name_matches("b")
    assert both.matches("/a/b")
    assert not both.matches("/a/c")
    either = Split.or_conditions([Split.name_matches("x"), Split.name_matches("y")])
    assert either.matches("/y")
    assert not either.matches("/z")
    assert Split.and_conditions([]).matches("/z")
    assert not Split.or_conditions([]).matches("/z")


@pytest.mark.parametrize(
    "regex", ["(", "*a", "a{99999999999999999999}", "(?P<n", "(" * 5000, "[[a]"]
)
def test_an_invalid_expression_matches_nothing_and_raises_nothing(regex: str) -> None:
    """Neither errors nor warnings of the compiler reach the caller."""
    assert not Split.path_matches(regex).matches("/(" if regex != "[[a]" else "/b")
    assert not Dim.DimensionName(regex).matches(0, "(" if regex != "[[a]" else "b")


@pytest.mark.parametrize(
    ("regex", "text"),
    [
        ("(a+)+$", "aaa"),
        ("(a|a)*$", "aaa"),
        ("(?:a|b)+$", "aaa"),
        ("(a?){5}a{5}", "a" * 5),
        ("(a{1,9}){9}", "a" * 9),
        ("((ab*)*)*", "ab"),
        (r"(a)\1", "aa"),
        ("(?=a)a", "a"),
        ("(?x) a", "a"),
        ("a*a*a*a*a*$", "a" * 30),
        ("^/?a*a*a*a*a*$", "a" * 30),
        ("a?" * 20 + "$", "a" * 20),
        ("(a|b)" * 20, "a" * 20),
        ("a{1,99}a{1,99}a{1,99}$", "a" * 99),
        ("a.*b" + "c" * 1000, "ab" + "c" * 1000),
        ("a*$", "a" * 600),
    ],
)
def test_preloading_passes_over_expressions_that_could_take_long(regex: str, text: str) -> None:
    """They match here, but not on any text in a time that a hint is worth; splitting needs them."""
    assert Split.path_matches(regex).matches(f"/{text}")
    for condition in (Preload.path_matches(regex), Preload.name_matches(regex)):
        assert not condition.matches(f"/{text}", 1)
        assert not condition.may_match(f"/{text}")


@pytest.mark.parametrize(
    "regex",
    [
        "temp", "^/air/", "time$", "^(time|lat|lon)$", "h(ei)?ght", "(?i)TEMP", r"\d+$", "[a-z]*0",
        ".*temp.*", "^/(air|sea)/.*$", "(?P<kind>air|sea)/t", "(/b)*/t", "x{2}", "x{1,3}/",
        "[])(*]", r"\(", "a{", "(.*/)?time$", "^$", "",
    ],
)  # fmt: skip
@pytest.mark.parametrize("path", ["/air/temperature", "/b/b/time", "/xx/10", "/height", "/a(", "/"])
def test_preloading_searches_ordinary_expressions_as_splitting_does(regex: str, path: str) -> None:
    """On paths of usual length."""
    assert Preload.path_matches(regex).matches(path, 1) == Split.path_matches(regex).matches(path)
    assert Preload.name_matches(regex).matches(path, 1) == Split.name_matches(regex).matches(path)


def test_the_default_is_searched_in_names_of_any_length() -> None:
    """Its expressions have several quantifiers, of which none backtracks far."""
    assert DEFAULT_PRELOAD_CONDITION.matches("/height_" + "a" * 5000, 1)
    assert not DEFAULT_PRELOAD_CONDITION.matches("/z" + "a" * 5000 + "0" * 5000 + "!", 1)


def test_rules_become_nested_dicts_and_back() -> None:
    """They do so in order, like the official ``to_dict`` and ``from_dict``."""
    rules = SOME.effective_manifest.effective_splitting
    assert ManifestSplittingConfig.from_dict(rules.to_dict()) == rules


def test_dimension_conditions_look_at_index_and_name() -> None:
    """An unnamed dimension matches no name, not even the empty expression."""
    assert Dim.Axis(1).matches(1, None)
    assert not Dim.Axis(1).matches(0, "x")
    assert Dim.DimensionName("lon").matches(7, "longitude")
    assert not Dim.DimensionName("").matches(7, None)
    assert Dim.Any().matches(3, None)


def test_preload_conditions_count_references_too() -> None:
    """The range includes its start and excludes its end."""
    some = Preload.num_refs(2, 4)
    assert [some.matches("/a", number) for number in (1, 2, 3, 4)] == [False, True, True, False]
    assert Preload.num_refs(None, None).matches("/a", 0)
    assert (Preload.false() | Preload.name_matches("a")).matches("/a", 0)
    assert not (Preload.true() & Preload.path_matches("b")).matches("/a", 0)


@pytest.mark.parametrize("path", ["/", "/time", "/group/b", "/b/c"])
@pytest.mark.parametrize(
    "condition",
    [
        Preload.true(),
        Preload.false(),
        Preload.path_matches("b"),
        Preload.name_matches("b"),
        Preload.num_refs(2, 4),
        Preload.num_refs(2, 4) & Preload.name_matches("b"),
        Preload.num_refs(2, 4) | Preload.name_matches("b"),
        (Preload.num_refs(2, 4) | Preload.false()) & Preload.path_matches("time"),
        DEFAULT_PRELOAD_CONDITION,
    ],
)
def test_a_path_alone_decides_that_no_manifest_matches(
    condition: ManifestPreloadCondition, path: str
) -> None:
    """Exactly where no number of references does."""
    matches = any(condition.matches(path, number) for number in (0, 3, 2000))
    assert condition.may_match(path) is matches


@pytest.mark.parametrize(
    ("path", "num_refs", "expected"),
    [
        ("/time", 1000, True),
        ("/time", 1001, False),
        ("/group/latitude", 5, True),
        ("/x", 1, True),
        ("/nlon", 1, True),
        ("/height2", 1, True),
        ("/temperature", 1, False),
        ("/", 1, False),
    ],
)
def test_small_coordinates_are_preloaded_by_default(
    path: str,
    num_refs: int,
    expected: bool,  # noqa: FBT001
) -> None:
    """Arrays named like axes, with a thousand references or fewer."""
    assert DEFAULT_PRELOAD_CONDITION.matches(path, num_refs) is expected


def test_conditions_of_the_other_kind_are_refused() -> None:
    """A combination holds only conditions of one family."""
    with pytest.raises(InvalidConfigError, match="a tuple of ManifestSplitCondition"):
        Split.or_conditions([Preload.true()])  # type: ignore[list-item]
    with pytest.raises(InvalidConfigError, match=r"PreloadRefs.from_refs is -1"):
        Preload.num_refs(-1, None)
