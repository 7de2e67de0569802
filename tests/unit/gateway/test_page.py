"""Pages of snapshots: what they show, and what strangers' text cannot do to them."""

from __future__ import annotations

import math
import zlib
from html.parser import HTMLParser
from typing import TYPE_CHECKING

import numpy as np
from hypothesis import given
from hypothesis import strategies as st
from zarr.api.asynchronous import create_array

from icechunk_async import Repository
from icechunk_async.gateway import Grant, app
from icechunk_async.gateway.page import _coloured, _png, _window
from tests.helpers import array_document, examples, memory_url, write
from tests.unit.gateway.client import ask

if TYPE_CHECKING:
    from tests.unit.gateway.conftest import Served

HOSTILE = '"><script>alert(1)</script>\u202e<img src=x onerror=alert(1)>'


class Reader(HTMLParser):
    """Collects tags, links and text."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.tags: set[str] = set()
        self.links: list[str] = []
        self.text = ""
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        """Note it."""
        self.tags.add(tag)
        assert not [name for name, _ in attrs if name.startswith("on")]
        self.links += [value or "" for name, value in attrs if name == "href"]

    def handle_data(self, data: str) -> None:
        """Add text."""
        self.text += data


async def test_a_snapshot_has_a_page(served: Served) -> None:
    """With its tree, history and changes, at the ref itself and as a file; links lead on."""
    gateway = app(served.repository)
    moved = await ask(gateway, "/@branch.main")
    assert (moved.status, moved.headers["location"]) == (307, "./@branch.main/")
    answer = await ask(gateway, "/@branch.main/")
    assert answer.status == 200
    assert answer.headers["content-type"] == "text/html; charset=utf-8"
    assert "default-src 'none'" in answer.headers["content-security-policy"]
    assert (await ask(gateway, "/@branch.main/index.html")).body == answer.body
    page = Reader(answer.body.decode())
    for words in ("/g/small", "first", "second", "2,048", "chunks of", str(served.tip)):
        assert words in page.text, words
    assert f"../@{served.first}/" in page.links
    for link in page.links:
        target = f"/@branch.main/{link}".replace("/@branch.main/../", "/")
        assert (await ask(gateway, target)).status == 200, link


async def test_a_page_is_asked_about_and_not_made_again(served: Served) -> None:
    """It may be nicer after an update, so that caches ask also about those of snapshots."""
    gateway = app(served.repository, refresh_seconds=60)
    for ref in ("branch.main", str(served.first)):
        answer = await ask(gateway, f"/@{ref}/")
        assert answer.headers["cache-control"] == "public, no-cache"
        served.storage.forget()
        again = await ask(gateway, f"/@{ref}/", if_none_match=answer.headers["etag"])
        assert again.status == 304
        assert served.storage.requests == {}


async def test_the_root_lists_branches_and_tags(served: Served) -> None:
    """With links to their pages."""
    await served.repository.create_branch("a/b", served.first)
    answer = await ask(app(served.repository), "/")
    page = Reader(answer.body.decode())
    assert page.links == ["./@branch.a%2Fb/", "./@branch.main/", "./@tag.v1/"]
    assert (await ask(app(served.repository), "/index.html")).body == answer.body


async def test_pages_need_a_grant_for_all_that_they_show(served: Served) -> None:
    """A part of the tree is not enough, and a ref is not enough for the list of refs."""
    token = "part-0123456789abcdef"  # noqa: S105 -- opens nothing
    part = app(served.repository, grants=[Grant("part", token, paths=["/g"])])
    ref = app(served.repository, grants=[Grant("ref", token, refs=["branch.main"])])
    named = [("authorization", f"Bearer {token}")]
    for target in ("/", "/@branch.main/", "/@branch.main/index.html"):
        assert (await ask(part, target, headers=named)).status == 403
    assert (await ask(ref, "/", headers=named)).status == 403
    assert served.storage.requests == {}
    assert (await ask(ref, "/@branch.main/", headers=named)).status == 200


async def test_text_of_others_stays_text() -> None:
    """Messages, properties, names, units, and documents that are not what they should be."""
    async with Repository.create(memory_url()) as repository:
        session = await repository.writable_session("main")
        odd = array_document((4,), (4,), attributes={"units": HOSTILE}, data_type="float32")
        await write(session, "odd/zarr.json", odd)
        await write(session, f"{HOSTILE.replace('/', '')}/zarr.json", odd)
        await write(session, "more/zarr.json", array_document((2, 2), (1, 1), data_type=HOSTILE))
        await session.commit(HOSTILE, metadata={HOSTILE: HOSTILE, "n": {"a": [HOSTILE]}})
        answer = await ask(app(repository), "/@branch.main/")
    assert answer.status == 200
    page = Reader(answer.body.decode())
    assert not page.tags & {"script", "iframe", "link", "object", "form"}
    assert HOSTILE.replace("\u202e", "\\u202e") in page.text
    assert "\u202e" not in answer.body.decode()


async def test_an_array_that_cannot_be_read_has_no_picture(served: Served) -> None:
    """The page has the rest, and says so."""
    async with served.repository.reopen(authorize_virtual_chunk_access={}) as other:
        answer = await ask(app(other), "/@branch.main/")
    assert "No picture: it cannot be read here (VirtualAccessError)." in answer.body.decode()
    assert "/elsewhere" not in answer.body.decode()


async def test_a_picture_reads_few_chunks(served: Served) -> None:
    """Sixty-four at most, however many the array has."""
    async with Repository.create(memory_url()) as repository:
        session = await repository.writable_session("main")
        await create_array(
            store=session.store, name="a", shape=(3, 900, 900), chunks=(1, 9, 9), dtype="float32"
        )
        await session.commit("a large array")
        answer = await ask(app(repository), "/@branch.main/")
    assert "[0, 0:56, 0:56]" in answer.body.decode()


async def test_a_picture_reads_no_huge_chunk() -> None:
    """Neither whole nor a part of it, as a chunk is decoded whole; one never written as well."""
    async with Repository.create(memory_url()) as repository:
        session = await repository.writable_session("main")
        for name, shape in (("flat", (10**6, 10**6)), ("deep", (10**9, 4, 4))):
            await create_array(
                store=session.store, name=name, shape=shape, chunks=shape, dtype="float32"
            )
        await session.commit("two chunks")
        answer = await ask(app(repository), "/@branch.main/")
    text = Reader(answer.body.decode()).text
    assert text.count("No picture: its chunks are too large to draw.") == 2


@examples(200)
@given(st.lists(st.tuples(st.integers(1, 10**12), st.integers(1, 10**6)), min_size=1, max_size=4))
def test_a_window_is_small(axes: list[tuple[int, int]]) -> None:
    """One chunk, or few chunks and cells; never outside of the array, and never empty."""
    shape, chunks = zip(*axes, strict=True)
    window = _window(shape, list(chunks))
    assert len(window) == min(2, len(shape))
    assert all(0 < a <= b for a, b in zip(window, shape[-2:], strict=True))
    counts = [-(-a // b) for a, b in zip(window, chunks[-2:], strict=True)]
    assert math.prod(counts) <= 64
    assert math.prod(counts) == 1 or math.prod(counts) * math.prod(chunks[-2:]) <= 1 << 22


def test_pixels_have_the_colours_of_the_scale() -> None:
    """From low to high; clear where there is no number; the greatest numbers do not overflow."""
    low, high = -1.7e308, 1.7e308
    pixels = _coloured(np.array([[low, high, np.nan, np.inf]]), low, high)
    assert pixels[0].tolist()[:2] == [[68, 1, 84, 255], [253, 231, 37, 255]]
    assert pixels[0, :, 3].tolist() == [255, 255, 0, 0]
    png = _png(pixels)
    assert png.startswith(b"\x89PNG\r\n\x1a\n")
    data = png[png.index(b"IDAT") + 4 : png.index(b"IEND") - 8]
    assert zlib.decompress(data) == b"\0" + pixels.tobytes()
