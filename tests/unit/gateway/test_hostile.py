"""Requests of strangers who mean no good: a 4xx, one sentence, no traceback, nothing read."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from hypothesis import given
from hypothesis import strategies as st

from icechunk_async import Repository
from icechunk_async.gateway import app
from icechunk_async.gateway.requests import (
    BadRequest,
    headers_of,
    parse_range,
    parse_target,
    path_of,
)
from icechunk_async.storage import slice_range
from tests.helpers import examples, memory_url
from tests.unit.gateway.client import ask

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.unit.gateway.conftest import Served


@pytest.mark.parametrize(
    ("target", "status"),
    [
        ("/@branch.main/../../etc/passwd", 400),
        ("/@branch.main/%2e%2e/%2e%2e/etc/passwd", 400),
        ("/@branch.main/..%2f..%2fetc/passwd", 400),
        ("/@branch.main/air%2fc/0", 400),
        ("/@branch.main//air/c/0", 400),
        ("/@branch.main/./air/c/0", 400),
        ("/@branch.main/air/c/0%00", 400),
        ("/@branch.main/air%0d%0aSet-Cookie:x/c/0", 400),
        ("/@branch.main/air/c/%zz", 400),
        ("/@branch.main/air/c/%", 400),
        ("/@branch.main/%ff%fe/zarr.json", 400),
        ("/@branch.main/%c0%ae%c0%ae/zarr.json", 400),
        ("/@branch.main/" + "a/" * 5000, 414),
        ("/@branch.main/air/c/00", 404),
        ("/@branch.main/air/c/99999999999999999999", 404),
        ("/@branch.main/air/c/-1", 404),
        ("/@branch.main/air/c/0/0", 404),
        ("/@branch.main/.zarray", 404),
        ("/@branch.main/snapshots/x", 404),
        ("/@branch./zarr.json", 404),
        ("/@commit.x/zarr.json", 404),
        ("/@/zarr.json", 404),
        ("/@branch.no%0asuch/zarr.json", 400),
        ("/etc/passwd", 404),
        ("/repo", 404),
        ("//", 404),
        ("*", 400),
    ],
)
async def test_hostile_paths_are_refused_and_read_no_chunk(
    served: Served, target: str, status: int
) -> None:
    """Each is refused, and reads no chunk."""
    answer = await ask(app(served.repository), target)
    assert answer.status == status
    assert answer.sentence
    assert not any(key.startswith("chunks/") for _, key in served.storage.log)


@pytest.mark.parametrize("name", ["a%2F..%2Fb", "a%2F%2Fb", "x%2F", "x" * 3000])
@pytest.mark.parametrize("kind", ["branch", "tag"])
async def test_names_that_no_ref_can_have_are_not_found(kind: str, name: str) -> None:
    """In format 1, in which a name is part of an object's key: there is no such ref."""
    async with Repository.create(memory_url(), spec_version=1) as repository:
        answer = await ask(app(repository), f"/@{kind}.{name}/zarr.json")
    assert answer.status == 404
    assert answer.sentence


@pytest.mark.parametrize(
    "method", ["PUT", "POST", "DELETE", "PATCH", "TRACE", "CONNECT", "get", "X" * 999]
)
async def test_methods_that_could_write_are_not_allowed(served: Served, method: str) -> None:
    """Others than GET, HEAD and OPTIONS are not allowed."""
    answer = await ask(app(served.repository), "/@branch.main/air/c/0", method)
    assert (answer.status, answer.headers["allow"]) == (405, "GET, HEAD, OPTIONS")
    assert answer.sentence
    assert served.storage.requests == {}


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ([("x", "y" * 40_000)], 431),
        ([("x", "y")] * 40_000, 431),
        ([("range", "bytes=9-0")], 400),
        ([("range", "bytes=-")], 400),
        ([("range", "bytes=a-b")], 400),
        ([("range", "bytes=")], 400),
        ([("range", "bytes=0-1," * 10_000 + "0-1")], 431),
        ([("range", ",".join(["bytes=0-1"] + ["0-1"] * 100))], 400),
        ([("range", "bytes=" + "9" * 5000 + "-")], 400),
        ([("range", "bytes=99999999999999999999-")], 416),
        ([("range", "bytes=0-1"), ("range", "bytes=2-3")], 400),
        ([("authorization", "Bearer a"), ("authorization", "Bearer b")], 400),
    ],
)
async def test_hostile_headers_are_refused_and_read_no_chunk(
    served: Served, headers: list[tuple[str, str]], status: int
) -> None:
    """Long ones, bad ranges, and single ones that come twice."""
    answer = await ask(app(served.repository), "/@branch.main/air/c/0", headers=headers)
    assert answer.status == status
    assert answer.sentence
    assert ("get", "chunks") not in [(verb, key[:6]) for verb, key in served.storage.log]


@examples(400)
@given(
    st.binary(max_size=60).map(lambda it: b"/" + it)
    | st.from_regex(rb"/@branch\.main(/[%./a-f0-9@]*)*")
)
def test_any_path_is_read_or_refused(raw: bytes) -> None:
    """A path that is read has no segment that leads elsewhere, and reads the same once more."""
    target = _refused(lambda: parse_target(path_of({"path": "/", "raw_path": raw})))
    if target is not None:
        assert not {"", ".", ".."} & set(target.key.removesuffix("/").split("/")) or not target.key
        assert parse_target(target.canonical.encode()) == target


@examples(400)
@given(
    st.text(st.characters(codec="latin-1"), max_size=40) | st.from_regex(r"bytes=[0-9,\- ]*"),
    st.integers(0, 99),
)
def test_any_range_is_inside_or_refused(text: str, size: int) -> None:
    """The part is always one of the bytes that there are."""
    part = _refused(lambda: slice_range(parse_range({"range": text}, None), size))
    if part is not None:
        assert 0 <= part[0] <= part[1] <= size


def _refused[R](read: Callable[[], R]) -> R | None:
    """Return the result; None if it was refused as it should be."""
    try:
        return read()
    except BadRequest as error:
        refusal = error
    assert 400 <= refusal.status < 500
    assert refusal.sentence.endswith(".")
    return None


def test_headers_with_one_name_are_joined() -> None:
    """As HTTP says; names do not care for case."""
    scope = {"headers": [(b"If-None-Match", b'"a"'), (b"if-none-match", b'"b" ')]}
    assert headers_of(scope) == {"if-none-match": '"a", "b"'}
