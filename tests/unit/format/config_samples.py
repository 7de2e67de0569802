"""Configurations to test with, and ways to make and to damage them."""

from __future__ import annotations

from hypothesis import strategies as st

from icechunk_async.format.config import (
    AzureStore,
    CachingConfig,
    ChecksumAlgorithm,
    CompressionAlgorithm,
    CompressionConfig,
    GcsStore,
    HttpStore,
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
)
from icechunk_async.format.config.codec import decode_config

Preload = ManifestPreloadCondition
Split = ManifestSplitCondition
Dim = ManifestSplitDimCondition

EVERYTHING = RepositoryConfig(
    inline_chunk_threshold_bytes=77,
    get_partial_values_concurrency=5,
    compression=CompressionConfig(CompressionAlgorithm.Zstd, 7),
    max_concurrent_requests=9,
    caching=CachingConfig(1, 2, 3, 4, 5),
    storage=StorageSettings(
        concurrency=StorageConcurrencySettings(3, 400),
        retries=StorageRetriesSettings(4, 5, 6),
        unsafe_use_conditional_create=True,
        unsafe_use_conditional_update=False,
        storage_class="A",
        chunks_storage_class="yes",
        minimum_size_for_multipart_upload=2**64 - 1,
        timeouts=StorageTimeoutSettings(1, 2, 3, 4),
    ),
    virtual_chunk_containers=(
        VirtualChunkContainer("s3://bucket/p/", S3Store(S3Options("us-east-1")), "n1"),
        VirtualChunkContainer("https://host/", HttpStore({"timeout": "5s"}, {"a": "b"})),
        VirtualChunkContainer("file:///tmp/x y/", LocalFileSystemStore("/tmp/x y")),  # noqa: S108
        VirtualChunkContainer("az://c/", AzureStore({"account": "null"})),
    ),
    manifest=ManifestConfig(
        preload=ManifestPreloadConfig(
            10, (Preload.path_matches("^/a: #") | Preload.num_refs(1, None)) & Preload.true(), 7
        ),
        splitting=ManifestSplittingConfig.from_dict(
            {
                Split.path_matches("x") & (Split.name_matches("y") | Split.any_array()): {
                    Dim.Axis(0): 3,
                    Dim.DimensionName("0"): 4,
                    Dim.Any(): 5,
                },
                Split.any_array(): {Dim.Any(): 2**32 - 1},
            }
        ),
        virtual_chunk_location_compression=ManifestVirtualChunkLocationCompressionConfig(
            5, 6, 7, -8
        ),
        max_concurrent_manifest_fetches_during_commit=3,
    ),
    repo_update_retries=RepoUpdateRetryConfig(StorageRetriesSettings(4, 5, 6)),
    num_updates_per_repo_info_file=12,
    max_concurrent_decodes=8,
    previous_file="~",
)


def read(text: str) -> RepositoryConfig:
    """Read YAML."""
    return decode_config(text.encode(), 1)


TEXTS = st.text(st.characters(exclude_categories=["Cs"]), max_size=12) | st.sampled_from(
    [
        *("yes", "~", "null", "", "1", "0x1F", "1e3", "2020-01-01", "- a", "a: b", "#", "!x", "&a"),
        *("é", "a\n b", " a ", "\x85", "\u2028", "\ufeff"),
    ]
)
U16, U32, U64 = (st.none() | st.integers(0, 2**bits - 1) for bits in (16, 32, 64))
POSITIVE = st.none() | st.integers(1, 2**16 - 1)
FLAGS = st.none() | st.booleans()


def maybe[T](strategy: st.SearchStrategy[T]) -> st.SearchStrategy[T | None]:
    """The value or None."""
    return st.none() | strategy


def containers() -> st.SearchStrategy[tuple[VirtualChunkContainer, ...] | None]:
    """Containers of every store, names and prefixes unique."""
    keys = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0"), max_size=5)
    texts = st.dictionaries(keys.filter(lambda key: key != "headers"), TEXTS, max_size=3)
    options = st.builds(
        S3Options,
        region=maybe(TEXTS),
        endpoint_url=maybe(TEXTS),
        allow_http=st.booleans(),
        anonymous=st.booleans(),
        force_path_style=st.booleans(),
        network_stream_timeout_seconds=U32,
        requester_pays=st.booleans(),
        checksum_algorithm=maybe(st.sampled_from(ChecksumAlgorithm)),
    )
    stores: st.SearchStrategy[tuple[str, ObjectStoreConfig]] = st.one_of(
        st.tuples(st.just("s3"), st.builds(S3Store, options)),
        st.tuples(st.just("s3"), st.builds(S3CompatibleStore, options)),
        st.tuples(st.just("tigris"), st.builds(TigrisStore, options)),
        st.tuples(st.just("gs"), st.builds(GcsStore, texts)),
        st.tuples(st.just("az"), texts.map(lambda found: AzureStore({**found, "account": "a"}))),
        st.tuples(st.just("https"), st.builds(HttpStore, texts, texts)),
        st.tuples(st.just("file"), st.builds(LocalFileSystemStore, TEXTS)),
    )
    names = maybe(TEXTS.filter(lambda name: bool(name) and "/" not in name))
    several = st.lists(st.tuples(stores, names), max_size=4, unique_by=lambda item: item[1])
    return maybe(
        several.map(
            lambda found: tuple(
                VirtualChunkContainer(f"{scheme}://host{place}/p/", store, name)
                for place, ((scheme, store), name) in enumerate(found)
            )
        )
    )


def configs() -> st.SearchStrategy[RepositoryConfig]:
    """Configurations with any fields set."""
    retries = st.builds(StorageRetriesSettings, POSITIVE, U32, U32)
    preloads = st.recursive(
        st.builds(Preload.path_matches, TEXTS)
        | st.builds(Preload.name_matches, TEXTS)
        | st.builds(Preload.num_refs, U32, U32)
        | st.sampled_from([Preload.true(), Preload.false()]),
        lambda inner: (
            st.builds(Preload.or_conditions, st.lists(inner, max_size=3))
            | st.builds(Preload.and_conditions, st.lists(inner, max_size=3))
        ),
        max_leaves=5,
    )
    splits = st.recursive(
        st.builds(Split.path_matches, TEXTS)
        | st.builds(Split.name_matches, TEXTS)
        | st.just(Split.any_array()),
        lambda inner: (
            st.builds(Split.or_conditions, st.lists(inner, max_size=3))
            | st.builds(Split.and_conditions, st.lists(inner, max_size=3))
        ),
        max_leaves=5,
    )
    dimensions = st.one_of(
        st.builds(Dim.Axis, st.integers(0, 2**64 - 1)),
        st.builds(Dim.DimensionName, TEXTS),
        st.just(Dim.Any()),
    )
    sizes = st.lists(st.tuples(dimensions, st.integers(1, 2**32 - 1)), max_size=3).map(tuple)
    rules = maybe(st.lists(st.tuples(splits, sizes), max_size=3).map(tuple))
    return st.builds(
        RepositoryConfig,
        inline_chunk_threshold_bytes=U16,
        get_partial_values_concurrency=U16,
        compression=maybe(
            st.builds(
                CompressionConfig,
                maybe(st.just(CompressionAlgorithm.Zstd)),
                st.none() | st.integers(0, 255),
            )
        ),
        max_concurrent_requests=U16,
        caching=maybe(st.builds(CachingConfig, U64, U64, U64, U64, U64)),
        storage=maybe(
            st.builds(
                StorageSettings,
                concurrency=maybe(st.builds(StorageConcurrencySettings, POSITIVE, POSITIVE)),
                retries=maybe(retries),
                unsafe_use_conditional_create=FLAGS,
                unsafe_use_conditional_update=FLAGS,
                unsafe_use_metadata=FLAGS,
                storage_class=maybe(TEXTS),
                metadata_storage_class=maybe(TEXTS),
                chunks_storage_class=maybe(TEXTS),
                minimum_size_for_multipart_upload=U64,
                timeouts=maybe(st.builds(StorageTimeoutSettings, U32, U32, U32, U32)),
            )
        ),
        virtual_chunk_containers=containers(),
        manifest=maybe(
            st.builds(
                ManifestConfig,
                preload=maybe(st.builds(ManifestPreloadConfig, U32, maybe(preloads), U32)),
                splitting=maybe(st.builds(ManifestSplittingConfig, rules)),
                virtual_chunk_location_compression=maybe(
                    st.builds(
                        ManifestVirtualChunkLocationCompressionConfig,
                        *(U16, U16, U32),
                        maybe(st.integers(-(2**31), 2**31 - 1)),
                    )
                ),
                max_concurrent_manifest_fetches_during_commit=U16,
            )
        ),
        repo_update_retries=maybe(st.builds(RepoUpdateRetryConfig, maybe(retries))),
        num_updates_per_repo_info_file=U16,
        max_concurrent_decodes=U16,
        previous_file=maybe(TEXTS),
    )


def mutations(data: bytes) -> st.SearchStrategy[bytes]:
    """The bytes with some replaced, inserted, removed, or repeated."""
    edit = st.tuples(
        st.integers(0, len(data)), st.binary(max_size=2) | TEXTS.map(str.encode), st.integers(0, 9)
    )

    def apply(edits: list[tuple[int, bytes, int]]) -> bytes:
        changed = data
        for at, new, removed in edits:
            changed = changed[:at] + new + changed[at + removed :]
        return changed

    return st.lists(edit, min_size=1, max_size=5).map(apply)
