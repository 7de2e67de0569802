"""Configurations that are damaged or hostile: only one kind of error."""

from __future__ import annotations

import os
from contextlib import suppress
from itertools import islice
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from icechunk_async.errors import (
    FormatError,
)
from icechunk_async.format.config.codec import decode_config, encode_config
from icechunk_async.format.json.flexbuffers import decode_flexbuffer
from icechunk_async.format.json.flexbuffers_writing import encode_flexbuffer
from tests.helpers import examples
from tests.unit.format.config_samples import EVERYTHING, TEXTS, mutations, read

if TYPE_CHECKING:
    from collections.abc import Iterator

MALFORMED = [
    "[]", "3", "a: [", "\ta: 3", "a: 1\n---\nb: 2\n", "a: *x", "a: &a [*a]", "{[1]: 2}",
    "a: 1\na: 2", '"\\ud800"', '"\\UFFFFFFFF"', "\x01", "%YAML " + "1" * 5000 + ".1\n--- a",
    "inline_chunk_threshold_bytes: 65536", "inline_chunk_threshold_bytes: -1",
    "inline_chunk_threshold_bytes: '3'", "inline_chunk_threshold_bytes: 3.0",
    "inline_chunk_threshold_bytes: 010", "inline_chunk_threshold_bytes: true",
    "inline_chunk_threshold_bytes: " + "9" * 100_000, "inline_chunk_threshold_bytes: [1]",
    "compression: {level: 256}", "compression: {algorithm: lz4}", "compression: [zstd]",
    "caching: {num_chunk_refs: 18446744073709551616}", "caching: 3",
    "storage: {unsafe_use_metadata: yes}", "storage: {unsafe_use_metadata: 1}",
    "storage: {storage_class: [a]}", "storage: {concurrency: {ideal_concurrent_request_size: 0}}",
    "storage: {retries: {max_tries: 0}}",
    "virtual_chunk_containers: [a]",
    "manifest: {splitting: {split_sizes: {}}}", "manifest: {splitting: {split_sizes: [any_array]}}",
    "manifest: {splitting: {split_sizes: [[any_array]]}}",
    "manifest: {splitting: {split_sizes: [[nosuch, []]]}}",
    "manifest: {splitting: {split_sizes: [[!or 3, []]]}}",
    "manifest: {splitting: {split_sizes: [[!name_matches {}, []]]}}",
    "manifest: {splitting: {split_sizes: [[any_array, [3]]]}}",
    "manifest: {splitting: {split_sizes: [[any_array, [[Any]]]]}}",
    "manifest: {splitting: {split_sizes: [[any_array, [{condition: Rest, num_chunks: 3}]]]}}",
    "manifest: {splitting: {split_sizes: [[any_array, [{condition: !Axis -1, num_chunks: 3}]]]}}",
    "manifest: {splitting: {split_sizes: [[any_array, [[Any, 4294967296]]]]}}",
    "manifest: {preload: {preload_if: nosuch}}", "manifest: {preload: {preload_if: [true]}}",
    "manifest: {preload: {preload_if: !num_refs {from: !Included 4294967296}}}",
    "manifest: {preload: {preload_if: !num_refs {from: 3}}}",
    "manifest: {preload: {preload_if: !num_refs {from: !Included true}}}",
    "manifest: {preload: {preload_if: !num_refs {from: !About 3}}}",
    "manifest: {preload: {preload_if: " + "!or [" * 49 + "'true'" + "]" * 49 + "}}",
    "[" * 100_000, "{" * 100_000, "- " * 100_000,
    "".join(" " * depth + "a:\n" for depth in range(500)),
    "a0: &a0 [x]\n" + "".join(f"a{n}: &a{n} [{f'*a{n - 1},' * 9}]\n" for n in range(1, 20)),
]  # fmt: skip


@pytest.mark.parametrize("text", MALFORMED, ids=range(len(MALFORMED)))
def test_malformed_yaml_is_a_format_error(text: str) -> None:
    """Syntax, types, ranges, depth, aliases that multiply: all are refused, and quickly."""
    with pytest.raises(FormatError):
        decode_config(text.encode("utf-8", "surrogatepass"), 1)


def test_other_malformed_bytes_are_format_errors() -> None:
    """Bytes that are no UTF-8, too many bytes, no FlexBuffer, a FlexBuffer of another shape."""
    for data, spec in [
        (b"\xff", 1),
        (b"a: \xed\xa0\x80", 1),
        (b"#" * (2**22 + 1), 1),
        (b"", 2),
        (b"\xff" * 50, 2),
        (encode_flexbuffer([1, 2]), 2),
        (encode_flexbuffer({"inline_chunk_threshold_bytes": 65536}), 2),
        (encode_flexbuffer({"inline_chunk_threshold_bytes": 1.0}), 2),
        (encode_flexbuffer({"compression": {"algorithm": 3}}), 2),
    ]:
        with pytest.raises(FormatError):
            decode_config(data, spec)


def test_errors_say_where_and_what() -> None:
    """The path of the field, the value and the range are in the message."""
    with pytest.raises(
        FormatError, match=r"config\.storage\.retries .*max_tries is 0; .*1 to 65535"
    ):
        read("storage: {retries: {max_tries: 0}}")
    with pytest.raises(FormatError, match=r"config\.compression\.algorithm is 'lz4'; .*zstd"):
        read("compression: {algorithm: lz4}")
    with pytest.raises(FormatError, match=r"not YAML in line 2"):
        read("a: 1\n\tb: 2\n")


@examples(500)
@given(mutations(encode_config(EVERYTHING, 1)) | st.binary(max_size=40) | TEXTS.map(str.encode))
def test_damaged_yaml_is_a_configuration_or_a_format_error(data: bytes) -> None:
    """Nothing else escapes, whatever the bytes."""
    with suppress(FormatError):
        decode_config(data, 1)


@examples(1500)
@given(mutations(encode_config(EVERYTHING, 2)))
def test_damaged_flexbuffers_are_a_configuration_or_a_format_error(data: bytes) -> None:
    """Nothing else escapes, whatever the bytes."""
    with suppress(FormatError):
        decode_config(data, 2)


REPLACEMENTS: list[Any] = [
    *(None, True, 0, -1, 2**64 - 1, 1.5, "", "x", "Any"),
    *([], {}, [1], {"a": 1}, {"or": [{}]}, {"Axis": "x"}, [[[1], 2]], {"num_refs": 3}),
]


def with_one_replaced(value: Any) -> Iterator[Any]:
    """The document with each of its parts in turn replaced by each of the replacements."""
    yield from REPLACEMENTS
    if isinstance(value, dict):
        for key, inner in value.items():
            yield from ({**value, key: changed} for changed in with_one_replaced(inner))
    elif isinstance(value, list):
        for place, inner in enumerate(value):
            for changed in with_one_replaced(inner):
                yield [*value[:place], changed, *value[place + 1 :]]


def test_values_of_a_wrong_shape_are_refused_wherever_they_are() -> None:
    """Every part of a full configuration in turn becomes something else; nothing stumbles.

    By default a third of the replacements at each place, others at the next one.
    """
    step = 1 if os.environ.get("EXAMPLES") == "all" else 3
    assert len(REPLACEMENTS) % 3
    refused = read = 0
    everything = with_one_replaced(decode_flexbuffer(encode_config(EVERYTHING, 2)))
    for document in islice(everything, 0, None, step):
        try:
            decode_config(encode_flexbuffer(document), 2)
            read += 1
        except FormatError:
            refused += 1
    assert refused > 1000 // step
    assert read > 200 // step
