"""The configuration as YAML and FlexBuffers: layout, lenient reading, hostile bytes."""

from __future__ import annotations

import logging
from dataclasses import fields

import pytest
from hypothesis import given
from hypothesis import strategies as st

from icechunk_async.errors import (
    FormatError,
    InvalidConfigError,
    InvalidInputError,
    UnsupportedSpecVersionError,
)
from icechunk_async.format.config import (
    CachingConfig,
    ManifestConfig,
    ManifestPreloadCondition,
    ManifestPreloadConfig,
    ManifestSplitCondition,
    ManifestSplittingConfig,
    RepositoryConfig,
    S3CompatibleStore,
    S3Options,
    S3Store,
    StorageSettings,
    VirtualChunkContainer,
    codec,
    merge,
)
from icechunk_async.format.config.codec import (
    decode_config,
    encode_config,
    splitting_from_json,
    splitting_to_json,
)
from icechunk_async.format.json.flexbuffers import decode_flexbuffer
from icechunk_async.format.json.flexbuffers_writing import encode_flexbuffer
from tests.helpers import examples
from tests.unit.format.config_samples import (
    EVERYTHING,
    Dim,
    Preload,
    Split,
    configs,
    read,
)

# The layout of the file as the official engine writes it, all fields unset.
UNSET_YAML = b"""\
inline_chunk_threshold_bytes: null
get_partial_values_concurrency: null
compression: null
max_concurrent_requests: null
max_concurrent_decodes: null
caching: null
storage: null
virtual_chunk_containers: null
manifest: null
previous_file: null
repo_update_retries: null
num_updates_per_repo_info_file: null
"""


def test_every_key_is_written() -> None:
    """Unset keys are written too, in the order of the official file."""
    assert encode_config(RepositoryConfig(), 1) == UNSET_YAML
    names = {spec.name for spec in fields(RepositoryConfig)}
    assert decode_flexbuffer(encode_config(RepositoryConfig(), 2)) == dict.fromkeys(names)


@pytest.mark.parametrize("spec_version", [1, 2])
def test_what_was_decoded_before_is_not_decoded_again(
    spec_version: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Repositories are opened over and over; YAML takes longer than all else of opening one."""
    decoded: list[int] = []
    original = codec._decode

    def noted(data: bytes, version: int) -> RepositoryConfig:
        decoded.append(len(data))
        return original(data, version)

    monkeypatch.setattr(codec, "_decode", noted)
    config = RepositoryConfig(previous_file=f"only in this test, {spec_version}")
    data = encode_config(config, spec_version)
    for buffer in (data, bytes(bytearray(data)), memoryview(data)):
        assert decode_config(buffer, spec_version) == config
    assert len(decoded) == 1
    other = RepositoryConfig(previous_file=f"of equal length , {spec_version}")
    assert decode_config(encode_config(other, spec_version), spec_version) == other
    assert len(decoded) == 2


@pytest.mark.parametrize("spec_version", [1, 2])
def test_neither_long_nor_damaged_configurations_are_kept(spec_version: int) -> None:
    """They take no memory, and damage is an error each time."""
    codec._decode_or_recall.cache_clear()
    long = RepositoryConfig(previous_file="x" * (1 << 14))
    for _ in range(2):
        assert decode_config(encode_config(long, spec_version), spec_version) == long
        with pytest.raises(FormatError):
            decode_config(b"[damaged", spec_version)
    assert codec._decode_or_recall.cache_info().currsize == 0


def test_the_yaml_has_the_official_layout() -> None:
    """Choices are tags, choices without value are text, numbers under a tag stay bare."""
    assert encode_config(EVERYTHING, 1).decode() == (
        """\
inline_chunk_threshold_bytes: 77
get_partial_values_concurrency: 5
compression:
  algorithm: zstd
  level: 7
max_concurrent_requests: 9
max_concurrent_decodes: 8
caching:
  num_snapshot_nodes: 1
  num_chunk_refs: 2
  num_transaction_changes: 3
  num_bytes_attributes: 4
  num_bytes_chunks: 5
storage:
  concurrency:
    max_concurrent_requests_for_object: 3
    ideal_concurrent_request_size: 400
  retries:
    max_tries: 4
    initial_backoff_ms: 5
    max_backoff_ms: 6
  timeouts:
    connect_timeout_ms: 1
    read_timeout_ms: 2
    operation_timeout_ms: 3
    operation_attempt_timeout_ms: 4
  unsafe_use_conditional_update: false
  unsafe_use_conditional_create: true
  unsafe_use_metadata: null
  storage_class: A
  metadata_storage_class: null
  chunks_storage_class: 'yes'
  minimum_size_for_multipart_upload: 18446744073709551615
virtual_chunk_containers:
  az://c/:
    name: null
    url_prefix: az://c/
    store: !azure
      account: 'null'
  file:///tmp/x y/:
    name: null
    url_prefix: file:///tmp/x y/
    store: !local_file_system /tmp/x y
  https://host/:
    name: null
    url_prefix: https://host/
    store: !http
      timeout: '5s'
      headers:
        a: b
  s3://bucket/p/:
    name: n1
    url_prefix: s3://bucket/p/
    store: !s3
      region: us-east-1
      endpoint_url: null
      anonymous: false
      allow_http: false
      force_path_style: false
      network_stream_timeout_seconds: null
      requester_pays: false
      checksum_algorithm: null
manifest:
  preload:
    max_total_refs: 10
    preload_if: !and
    - !or
      - !path_matches
        regex: '^/a: #'
      - !num_refs
        from: !Included 1
        to: Unbounded
    - 'true'
    max_arrays_to_scan: 7
  splitting:
    split_sizes:
    - - !and
        - !path_matches
          regex: x
        - !or
          - !name_matches
            regex: 'y'
          - any_array
      - - condition: !Axis 0
          num_chunks: 3
        - condition: !DimensionName '0'
          num_chunks: 4
        - condition: Any
          num_chunks: 5
    - - any_array
      - - condition: Any
          num_chunks: 4294967295
  virtual_chunk_location_compression:
    min_num_chunks: 5
    dictionary_max_training_samples: 6
    dictionary_max_size_bytes: 7
    compression_level: -8
  max_concurrent_manifest_fetches_during_commit: 3
previous_file: '~'
repo_update_retries:
  default:
    max_tries: 4
    initial_backoff_ms: 5
    max_backoff_ms: 6
num_updates_per_repo_info_file: 12
"""
    )


@examples(300)
@given(configs(), st.sampled_from([1, 2]))
def test_values_read_back(config: RepositoryConfig, spec: int) -> None:
    """Every configuration survives both forms."""
    assert decode_config(memoryview(encode_config(config, spec)), spec) == config


@examples(100)
@given(configs(), configs(), configs())
def test_merging_is_associative_with_the_unset_configuration_as_unit(
    first: RepositoryConfig, second: RepositoryConfig, third: RepositoryConfig
) -> None:
    """The order of merging three layers does not matter, only their strength."""
    assert merge(merge(first, second), third) == merge(first, merge(second, third))
    assert merge(first, RepositoryConfig()) == merge(RepositoryConfig(), first) == first


def test_plain_scalars_follow_yaml_1_2() -> None:
    """A field of text takes any scalar as it stands; others take what version 1.2 makes of it."""
    config = read(
        "\ufeffinline_chunk_threshold_bytes: 0x10\n"
        "max_concurrent_requests: 0o17\n"
        "previous_file: 010\n"
        "storage: {storage_class: yes, chunks_storage_class: 1_000, unsafe_use_metadata: True}\n"
        "caching: {num_chunk_refs: ~, num_bytes_chunks: +5}\n"
        "compression:\n"
    )
    assert config.inline_chunk_threshold_bytes == 16
    assert config.max_concurrent_requests == 15
    assert config.previous_file == "010"
    assert config.storage == StorageSettings(
        storage_class="yes", chunks_storage_class="1_000", unsafe_use_metadata=True
    )
    assert config.caching == CachingConfig(num_bytes_chunks=5)
    assert config.compression is None


@pytest.mark.parametrize("text", ["", "null", "{}", "# nothing", "---\n...\n", "~"])
def test_an_empty_file_is_the_unset_configuration(text: str) -> None:
    """YAML has several ways to say nothing."""
    assert read(text) == RepositoryConfig()
    assert decode_config(encode_flexbuffer(None), 2) == RepositoryConfig()


def test_unknown_keys_and_aliases_are_ignored() -> None:
    """Keys of later versions are passed over; an alias repeats what it names; << is no merge."""
    config = read("a: &x {num_chunk_refs: 4, new: [1]}\ncaching: *x\nstorage: {<<: *x}\n")
    assert config == RepositoryConfig(
        caching=CachingConfig(num_chunk_refs=4), storage=StorageSettings()
    )


def test_shapes_from_before_1_0_are_read(caplog: pytest.LogCaptureFixture) -> None:
    """Containers keyed by name, bare prefixes, camel case, pairs in splitting rules."""
    with caplog.at_level(logging.WARNING):
        config = read(
            "unsafe_overwrite_refs: null\n"
            "virtual_chunk_containers:\n"
            "  s3:\n"
            "    name: s3\n"
            "    url_prefix: s3://testbucket\n"
            "    store: !S3Compatible {region: us-east-1, anonymous: false, allow_http: true}\n"
            "  gcs: {name: gcs, url_prefix: gcs, store: !Gcs {}}\n"
            "  file: {name: file, url_prefix: file, store: !LocalFileSystem ''}\n"
            "manifest:\n"
            "  splitting:\n"
            "    split_sizes:\n"
            "    - - !name_matches {regex: split_*}\n"
            "      - - - !Axis 0\n"
            "          - 1\n"
            "        - - !DimensionName longitude\n"
            "          - 1\n"
            "        - - Any\n"
            "          - 3\n"
        )
    store = S3CompatibleStore(S3Options(region="us-east-1", allow_http=True))
    assert config.virtual_chunk_containers == (
        VirtualChunkContainer("s3://testbucket/", store, "s3"),
    )
    assert config.manifest == ManifestConfig(
        splitting=ManifestSplittingConfig.from_dict(
            {
                Split.name_matches("split_*"): {
                    Dim.Axis(0): 1,
                    Dim.DimensionName("longitude"): 1,
                    Dim.Any(): 3,
                }
            }
        )
    )
    skipped = [record.getMessage() for record in caplog.records]
    assert len(skipped) == 2
    assert all("skipped entry" in message for message in skipped)


GOOD_STORE = "store: !s3 {anonymous: false, allow_http: false}"


@pytest.mark.parametrize(
    "entry",
    [
        "null",
        "3",
        "{url_prefix: 's3://b/'}",
        f"{{{GOOD_STORE}}}",
        f"{{url_prefix: [], {GOOD_STORE}}}",
        f"{{url_prefix: 'gs://b/', {GOOD_STORE}}}",
        f"{{url_prefix: 's3://b/', name: a/b, {GOOD_STORE}}}",
        f"{{url_prefix: 's3://b/', name: '', {GOOD_STORE}}}",
        f"{{url_prefix: 's3://good/', {GOOD_STORE}}}",
        f"{{url_prefix: 's3://b/', name: good, {GOOD_STORE}}}",
        "{url_prefix: 's3://b/', store: !nosuch {}}",
        "{url_prefix: 's3://b/', store: {s3: {}, gcs: {}}}",
        "{url_prefix: 's3://b/', store: !s3 {anonymous: 1, allow_http: false}}",
        "{url_prefix: 's3://b/', store: !s3 {checksum_algorithm: md5}}",
        "{url_prefix: 's3://b/', store: !s3 {network_stream_timeout_seconds: 99999999999}}",
        "{url_prefix: 'http://b/', store: !http {headers: 3}}",
        "{url_prefix: 'gs://b/', store: !gcs {a: [b]}}",
    ],
)
def test_a_container_that_cannot_serve_is_skipped_with_a_warning(
    entry: str, caplog: pytest.LogCaptureFixture
) -> None:
    """The others and the rest of the configuration are kept."""
    good = f"{{name: good, url_prefix: 's3://good/', {GOOD_STORE}}}"
    text = f"max_concurrent_requests: 7\nvirtual_chunk_containers:\n  a: {good}\n  b: {entry}\n"
    with caplog.at_level(logging.WARNING):
        config = read(text)
    assert config == RepositoryConfig(
        max_concurrent_requests=7,
        virtual_chunk_containers=(VirtualChunkContainer("s3://good/", S3Store(), "good"),),
    )
    (record,) = caplog.records
    assert "skipped entry 1" in record.getMessage()


def test_chained_conditions_stay_flat_and_deep_ones_are_refused() -> None:
    """Operators add to the combination on their left, so that long chains fit the stored form."""
    chain: ManifestSplitCondition = Split.name_matches("0")
    for number in range(1, 200):
        chain = chain | Split.name_matches(str(number))
    config = RepositoryConfig(
        manifest=ManifestConfig(
            splitting=ManifestSplittingConfig.from_dict({chain: {Dim.Any(): 1}})
        )
    )
    for spec in (1, 2):
        assert decode_config(encode_config(config, spec), spec) == config
    deep: ManifestPreloadCondition = Preload.true()
    for _ in range(48):
        deep = Preload.or_conditions([deep])
    with pytest.raises(InvalidConfigError, match="nests more than 48 deep"):
        Preload.or_conditions([deep])
    manifest = ManifestConfig(preload=ManifestPreloadConfig(preload_if=deep))
    deepest = RepositoryConfig(manifest=manifest)
    for spec in (1, 2):
        assert decode_config(encode_config(deepest, spec), spec) == deepest


def test_ranges_of_references_are_read_whatever_their_bounds() -> None:
    """The stored form includes or excludes either end; values know one way of each."""
    text = "manifest: {preload: {preload_if: !num_refs {from: %s, to: %s}}}"
    for stored, expected in {
        ("!Included 1", "!Excluded 5"): Preload.num_refs(1, 5),
        ("!Excluded 1", "!Included 5"): Preload.num_refs(2, 6),
        ("Unbounded", "null"): Preload.num_refs(None, None),
        ("!Included 0", "!Included 4294967295"): Preload.num_refs(0, None),
        ("!Excluded 4294967295", "Unbounded"): Preload.false(),
    }.items():
        manifest = read(text % stored).effective_manifest
        assert manifest.effective_preload.preload_if == expected


def test_a_rule_over_no_chunk_is_passed_over(caplog: pytest.LogCaptureFixture) -> None:
    """The official engine stores it, and fails when it commits."""
    rules = "[[any_array, [{condition: !Axis 0, num_chunks: 0}, {condition: Any, num_chunks: 3}]]]"
    with caplog.at_level(logging.WARNING):
        config = read(f"manifest: {{splitting: {{split_sizes: {rules}}}}}")
    expected = ManifestSplittingConfig.from_dict({Split.any_array(): {Dim.Any(): 3}})
    assert config.effective_manifest.splitting == expected
    assert "no chunk" in caplog.text


def test_secrets_stay_out_of_logs_and_messages(caplog: pytest.LogCaptureFixture) -> None:
    """Messages quote neither skipped containers nor broken files."""
    with caplog.at_level(logging.WARNING):
        read(
            "virtual_chunk_containers:\n"
            "  a: {url_prefix: 'http://me:hush@host/', store: !gcs {token: hush}}\n"
            "  b: {url_prefix: 'gs://b/', store: !gcs {token: [hush]}}\n"
        )
    assert len(caplog.records) == 2
    assert "hush" not in caplog.text
    with pytest.raises(FormatError) as broken:
        read("a: !gcs {token: hush\n")
    assert "hush" not in str(broken.value)


def test_an_unknown_version_is_refused() -> None:
    """No version but 1 and 2 has a form."""
    with pytest.raises(InvalidInputError, match="spec version 3"):
        encode_config(RepositoryConfig(), 3)
    with pytest.raises(UnsupportedSpecVersionError, match="spec version 0"):
        decode_config(b"", 0)


# Splitting rules as a property of commits


def test_splitting_rules_are_recorded_as_the_official_engine_records_them() -> None:
    """Choices are text or maps of one entry; without rules the default rule is recorded."""
    rules = EVERYTHING.effective_manifest.effective_splitting
    recorded = splitting_to_json(rules)
    assert recorded == {
        "split_sizes": [
            [
                {"and": [
                    {"path_matches": {"regex": "x"}},
                    {"or": [{"name_matches": {"regex": "y"}}, "any_array"]},
                ]},
                [
                    {"condition": {"Axis": 0}, "num_chunks": 3},
                    {"condition": {"DimensionName": "0"}, "num_chunks": 4},
                    {"condition": "Any", "num_chunks": 5},
                ],
            ],
            ["any_array", [{"condition": "Any", "num_chunks": 4294967295}]],
        ]
    }  # fmt: skip
    assert splitting_from_json(recorded) == rules
    assert splitting_to_json(ManifestSplittingConfig()) == {
        "split_sizes": [
            [
                {"path_matches": {"regex": ".*"}},
                [{"condition": "Any", "num_chunks": 4294967295}],
            ]
        ]
    }
    with pytest.raises(FormatError, match="splitting_config"):
        splitting_from_json(["x"])
