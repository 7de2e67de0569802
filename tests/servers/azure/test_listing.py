"""Listings are in the order of UTF-8 bytes, whether the service orders by UTF-8 or by UTF-16."""

from __future__ import annotations

from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from icechunk_async.storage import ObjectInfo
from icechunk_async_azure.options import Place
from icechunk_async_azure.reading import list_entries, lowest_start

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable

_ROOT = "root/"
_PAGE = 3


def _utf_8(name: str) -> bytes:
    return name.encode()


def _utf_16(name: str) -> bytes:
    return name.encode("utf-16-be")


class _Container:
    """Lists pages as the service does: groups before objects, next pages by the order."""

    def __init__(self, names: list[str], order: Callable[[str], bytes]) -> None:
        self._names = [_ROOT + name for name in names]
        self._order = order

    def list_blobs(
        self, *, name_starts_with: str, results_per_page: int, start_from: str = ""
    ) -> Any:
        """Return objects."""
        assert results_per_page > 0
        return self._pages(name_starts_with, start_from, "")

    def walk_blobs(
        self, *, name_starts_with: str, delimiter: str, results_per_page: int, start_from: str = ""
    ) -> Any:
        """Return objects and groups."""
        assert results_per_page > 0
        return self._pages(name_starts_with, start_from, delimiter)

    def _pages(self, prefix: str, start: str, delimiter: str) -> Any:
        found: set[tuple[str, bool]] = set()
        for name in self._names:
            if name.startswith(prefix) and self._order(name) >= self._order(start):
                cut = name.find("/", len(prefix)) if delimiter else -1
                found.add((name, False) if cut < 0 else (name[: cut + 1], True))
        ordered = sorted(found, key=lambda one: self._order(one[0]))

        async def items(page: list[tuple[str, bool]]) -> AsyncIterator[Any]:
            for name, is_group in sorted(page, key=lambda one: not one[1]):
                details = {} if is_group else {"last_modified": "now", "size": 1}
                yield SimpleNamespace(name=name, **details)

        async def pages() -> AsyncIterator[Any]:
            for index in range(0, len(ordered), _PAGE):
                yield items(ordered[index : index + _PAGE])

        return SimpleNamespace(by_page=pages)


async def _listed(names: list[str], order: Any, prefix: str, after: Any, *, grouped: bool) -> Any:
    async def here() -> Any:
        return SimpleNamespace(container=_Container(names, order))

    async def ask(request: Any, _action: str) -> Any:
        return await request

    clients = SimpleNamespace(here=here, check_open=lambda: None)
    requests: Any = SimpleNamespace(place=Place("box", _ROOT), clients=clients, ask=ask)
    entries = list_entries(requests, prefix, after, grouped=grouped)
    return [e.key if isinstance(e, ObjectInfo) else e.prefix async for e in entries]


_TEXT = st.text(alphabet="ab/\ud7ff\ue000\uffee\U0001f600\U0010ffff", min_size=1, max_size=5)
_NAME = _TEXT.filter(lambda text: all(text.split("/")))


@pytest.mark.parametrize("order", [_utf_8, _utf_16])
@given(
    names=st.lists(_NAME, unique=True, max_size=30),
    prefix=st.text(alphabet="ab/\ue000\U0001f600", max_size=2),
    after=st.none() | _TEXT,
    grouped=st.booleans(),
)
async def test_every_listing_is_in_order_and_complete(
    order: Any, names: list[str], prefix: str, after: str | None, *, grouped: bool
) -> None:
    """No entry is missing, doubled or out of place, for any arguments."""
    expected: set[str] = set()
    for name in names:
        if name.startswith(prefix):
            cut = name.find("/", len(prefix)) if grouped else -1
            entry = name if cut < 0 else name[: cut + 1]
            if after is None or entry.encode() > after.encode():
                expected.add(entry)
    found = await _listed(names, order, prefix, after, grouped=grouped)
    assert found == sorted(expected, key=str.encode)


@given(st.lists(_TEXT, min_size=2, max_size=2))
def test_a_continued_listing_respects_both_orders(pair: list[str]) -> None:
    """The service is asked from a place that no later name, in UTF-8, lies before."""
    start, name = sorted(pair, key=str.encode)
    for order in (_utf_8, _utf_16):
        assert order(lowest_start(start)) <= order(name)
