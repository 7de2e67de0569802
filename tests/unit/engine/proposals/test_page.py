"""The page of a proposal: everything is on it, and nothing on it can do harm."""

from __future__ import annotations

import json
from dataclasses import replace
from html.parser import HTMLParser

from hypothesis import given
from hypothesis import strategies as st

from icechunk_async import Repository
from icechunk_async.engine.proposals.page import render
from icechunk_async.engine.proposals.record import (
    ArrayReview,
    Candidate,
    CellReview,
    ChangeMap,
    CheckResult,
    KeyReview,
    NodeReview,
    ProposalRecord,
    ProposalState,
    Review,
    decode_record,
    encode_record,
)
from icechunk_async.format.ids import ProposalId, SnapshotId
from tests.helpers import examples, make_array, memory_url, objects, write

TAGS = {
    "html",
    "head",
    "meta",
    "title",
    "style",
    "body",
    "h1",
    "h2",
    "h3",
    "p",
    "span",
    "code",
    "pre",
    "div",
    "table",
    "tr",
    "th",
    "td",
    "br",
    "figure",
    "svg",
    "rect",
    "figcaption",
}
ATTRIBUTES = {
    "lang",
    "charset",
    "name",
    "content",
    "http-equiv",
    "class",
    "colspan",
    "role",
    "aria-label",
    "width",
    "height",
    "viewbox",
    "xmlns",
    "x",
    "y",
    "opacity",
}


class Reader(HTMLParser):
    """Collects what a browser would see."""

    def __init__(self) -> None:
        super().__init__()
        self.tags: set[str] = set()
        self.attributes: set[str] = set()
        self.text = ""

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        """Note a tag and its attributes."""
        self.tags.add(tag)
        self.attributes |= {name for name, _ in attrs}

    def handle_data(self, data: str) -> None:
        """Note text."""
        self.text += data


def read(page: str) -> Reader:
    """Read a page to its end."""
    reader = Reader()
    reader.feed(page)
    reader.close()
    return reader


def record(text: str, path: str = "/a") -> ProposalRecord:
    """Return a record with a text in every place that takes one."""
    found = ChangeMap(2, 2, 1, 1, (0.0, 1.0, -2.0, 3.0))
    return ProposalRecord(
        ProposalId(b"p" * 12),
        3,
        "s",
        1,
        2,
        ProposalState.CLOSED,
        text[:500],
        text + "!",
        text,
        text,
        SnapshotId(b"s" * 12),
        ((text or "x")[:200],),
        Candidate(
            SnapshotId(b"c" * 12),
            SnapshotId(b"t" * 12),
            (CheckResult((text or "x")[:200], "failed", text, 1.5, 7),),
        ),
        Review(
            (NodeReview("moved", path, text, is_array=True, keys=(KeyReview(text, text, None),)),),
            1,
            (
                ArrayReview(
                    path,
                    1,
                    2,
                    3,
                    found,
                    10,
                    5,
                    -1.0,
                    0.5,
                    2.0,
                    (CellReview((1,), text, text),),
                    found,
                    text,
                ),
            ),
            2,
        ),
        {text: text},
        None,
        text,
    )


HOSTILE = [
    "<script>alert(1)</script>",
    '"><img src=x onerror=alert(1)>',
    "' onmouseover='alert(1)",
    "</title><svg onload=alert(1)>",
    "</style><iframe>",
    "<!-- ",
    "]]>",
    "&lt;b&gt;",
    "\u202eevil\u2066",
    "\x1b[31m\x00",
]


@given(st.one_of(st.sampled_from(HOSTILE), st.text(max_size=40)))
@examples(200)
def test_text_of_others_stays_text(text: str) -> None:
    """For any text, the page has the same tags, and says what it forbids."""
    if text.encode("utf-8", "ignore").decode() != text:
        return  # lone surrogates are refused before anything is stored
    page = render(record(text))
    found = read(page)
    assert found.tags <= TAGS
    assert found.attributes <= ATTRIBUTES
    plain = read(render(record("x")))
    assert found.tags == plain.tags
    assert "default-src 'none'; style-src 'unsafe-inline'" in page
    assert not [it for it in page if it != "\n" and not it.isprintable()]


def test_the_page_says_all_that_its_record_holds() -> None:
    """State, branches, snapshots, checks, nodes, values and maps."""
    text = read(render(record("said"))).text
    for part in (
        "closed",
        str(SnapshotId(b"c" * 12)),
        "1.500",
        "failed",
        "Chunks: 1 added, 2 changed, 3 removed.",
        "5 of 10 (50.000%)",
        "least -1, mean +0.5, greatest +2",
        "And 1 more.",
        "And 2 more arrays.",
        "[1]",
    ):
        assert part in text
    assert render(record("said")).count("<rect") == 2 * (1 + 3)
    assert "prefers-color-scheme: dark" in render(record("said"))


@given(st.text(max_size=60))
@examples(100)
def test_records_come_back_as_they_were(text: str) -> None:
    """Or are refused, if UTF-8 has no form for them."""
    if text.encode("utf-8", "ignore").decode() != text:
        return
    given_record = record(text)
    assert decode_record(encode_record(given_record), given_record.id, 3) == given_record


def test_a_record_of_many_maps_makes_no_huge_page() -> None:
    """This library stores 40 arrays with maps; a record of others could have a thousand."""
    given_record = record("x")
    (array,) = given_record.review.arrays
    review = replace(given_record.review, arrays=(array,) * 1_000)
    page = render(replace(given_record, review=review))
    assert page.count("<svg") == 200
    assert page.count("<h3>") == 1_000


async def test_a_hostile_repository_makes_a_harmless_page() -> None:
    """Names of branches, paths, attributes and messages; the stored page is the same."""
    async with Repository.create(memory_url()) as repository:
        session = await repository.writable_session("main")
        await make_array(session, "a", (4,), (1,))
        base = await session.commit("base")
        branch = "<script>alert('b')</script>"
        await repository.create_branch(branch, base)
        session = await repository.writable_session(branch)
        path = "<img src=x onerror=alert(1)>"
        await make_array(session, path, (4,), (1,))
        document = {"zarr_format": 3, "node_type": "group", "attributes": {"<b>": "</td><script>"}}
        await write(session, "g/zarr.json", json.dumps(document).encode())
        await write(session, "a/c/1", b"\x01")
        await make_array(session, "a", (4,), (1,), attributes={"<i>k": "<script>1</script>"})
        await session.commit(HOSTILE[0])

        async def check(session: object, proposal: object) -> str:
            return "<script>said</script>"

        proposal = await repository.propose(branch, checks=[check], title=HOSTILE[3])
        page = proposal.page()
        stored = (await objects(repository.storage))[f"proposals/{proposal.id}/review.html"]
    assert stored.decode() == page
    found = read(page)
    assert found.tags <= TAGS
    assert found.attributes <= ATTRIBUTES
    for text in (branch, path, "<i>k", "<script>1</script>", "<script>said</script>", HOSTILE[3]):
        assert text in found.text, text
