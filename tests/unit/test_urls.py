"""URLs of a repository, a ref and a node."""

# Hypothesis infers no types of lambdas.
# pyright: basic

from __future__ import annotations

from datetime import UTC, datetime, timedelta, timezone
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from icechunk_async.errors import InvalidInputError, InvalidURLError
from icechunk_async.format.ids import SnapshotId
from icechunk_async.urls import IcechunkURL, is_icechunk_url
from tests.helpers import examples

ID = "1CECHNKREP0F1RSTCMT0"

PARTS: list[tuple[str, dict[str, Any]]] = [
    ("s3://b/r", {}),
    ("s3://b/r/|icechunk:", {}),
    ("s3://b/r|icechunk", {}),
    ("s3://b/r|ICECHUNK:", {}),
    ("s3://b/r|icechunk-async:", {}),
    ("s3://b/r/|icechunk:g/a", {"path": "/g/a"}),
    ("s3://b/r/|icechunk:/g/a/", {"path": "/g/a"}),
    ("s3://b/r/|icechunk:@branch.main", {"branch": "main"}),
    ("s3://b/r/|icechunk:@branch.main/g/a", {"branch": "main", "path": "/g/a"}),
    ("s3://b/r/|icechunk:@branch.a%2Fb/g", {"branch": "a/b", "path": "/g"}),
    ("s3://b/r/|icechunk:@branch.v1.0.x", {"branch": "v1.0.x"}),
    ("s3://b/r/|icechunk:@tag.v1.0/g", {"tag": "v1.0", "path": "/g"}),
    (f"s3://b/r/|icechunk:@{ID}/g", {"snapshot_id": ID, "path": "/g"}),
    (f"s3://b/r/|icechunk:@{ID.lower()}", {"snapshot_id": ID}),
    ("s3://b/r/|icechunk:@as-of.2026-01-31", {"as_of": datetime(2026, 1, 31, tzinfo=UTC)}),
    (
        "s3://b/r/|icechunk:@branch.dev@as-of.2026-01-31T12:00+01:00/g",
        {
            "branch": "dev",
            "as_of": datetime(2026, 1, 31, 12, tzinfo=timezone(timedelta(hours=1))),
            "path": "/g",
        },
    ),
    ("s3://b/r/|icechunk:%40a/b%20c", {"path": "/@a/b c"}),
    ("s3://b/r/|icechunk://branch.main/g", {"branch": "main", "path": "/g"}),
    (f"s3://b/r/|icechunk://{ID}", {"snapshot_id": ID}),
    ("s3://b/r/|icechunk:@tag.v5/|zarr3:g/a/", {"tag": "v5", "path": "/g/a"}),
    ("s3://b/r/|icechunk:g|zarr3:a", {"path": "/g/a"}),
]


@pytest.mark.parametrize(("text", "parts"), PARTS, ids=[text for text, _ in PARTS])
def test_a_url_is_parsed_into_its_parts_and_back(text: str, parts: dict[str, Any]) -> None:
    """In every form, with and without what may be left out; the text form reads the same."""
    url = IcechunkURL.parse(text)
    assert url == IcechunkURL("s3://b/r", **parts)
    assert IcechunkURL.parse(str(url)) == url


@pytest.mark.parametrize(
    ("location", "kept"),
    [
        ("/data/repo/", "/data/repo"),
        ("repo", "repo"),
        ("/", "/"),
        ("file:///", "file:///"),
        ("file:///data/a%7Cb", "file:///data/a%7Cb"),
        ("https://host/r?sig=1/", "https://host/r?sig=1/"),
        ("memory://x", "memory://x"),
    ],
)
def test_the_location_stays_as_it_is(location: str, kept: str) -> None:
    """But for slashes at its end; a query belongs to it."""
    url = IcechunkURL.parse(f"{location}|icechunk:@branch.main/g")
    assert url.location == kept
    assert IcechunkURL.parse(str(url)) == url


NAMES = st.text(
    st.characters(codec="utf-8", exclude_characters="\0/"), min_size=1, max_size=8
).filter(lambda it: it not in {".", ".."})
REFS = st.one_of(
    st.just(dict[str, Any]()),
    st.builds(
        lambda name, moment: {"branch": name, "as_of": moment},
        st.none() | st.text(st.characters(codec="utf-8"), min_size=1, max_size=8),
        st.none() | st.datetimes(timezones=st.just(UTC)),
    ),
    st.builds(lambda it: {"tag": it}, st.text(st.characters(codec="utf-8"), min_size=1)),
    st.builds(lambda it: {"snapshot_id": str(SnapshotId(it))}, st.binary(min_size=12, max_size=12)),
)


@examples(400)
@given(REFS, st.lists(NAMES, max_size=3))
def test_every_url_reads_as_it_was_written(ref: dict[str, Any], names: list[str]) -> None:
    """Names of any characters, with slashes, bars, '@as-of.' and percent signs among them."""
    url = IcechunkURL("s3://bucket/repo", **ref, path="/".join(names))
    text = str(url)
    assert is_icechunk_url(text)
    assert text.isascii()
    assert text.count("|") == 1
    assert IcechunkURL.parse(text) == url


@examples(400)
@given(st.text(alphabet="abc@.|:/%2F?#as-of.branchtag icechunk", max_size=40))
def test_any_text_is_a_url_or_one_sentence(rest: str) -> None:
    """No other error, and what is read can be written."""
    try:
        url = IcechunkURL.parse(f"s3://b/r|icechunk:{rest}")
    except InvalidInputError as error:
        said = str(error)
    else:
        said = "a URL"
        assert IcechunkURL.parse(str(url)) == url
    assert said
    assert "\n" not in said


@pytest.mark.parametrize(
    ("rest", "message"),
    [
        ("@main", r"'@main', whose kind is not clear\. Write '@branch\.NAME'"),
        ("@branch.", "whose kind is not clear"),
        ("@branches.main/g", "whose kind is not clear"),
        ("@branch.dev@as-of.yesterday", "'yesterday' that is not ISO 8601"),
        ("@tag.v1@as-of.2026-01-01", "A time goes with a branch"),
        (f"@{ID}@as-of.2026-01-01", "A time goes with a branch"),
        ("g?x=1", r"has '\?' after 'icechunk:'.*'%3F'"),
        ("g#x", "has '#' after 'icechunk:'.*'%23'"),
        ("a%2Fb", "no node has '/' in its name"),
        ("a/../b", "is not a node path"),
        ("a//b", "is not a node path"),
        ("%ff", "not in UTF-8"),
        ("|zip:a", "a step 'zip:a' after 'icechunk:'"),
        ("|zarr3:a|zarr3:b", "a step 'zarr3:a' after"),
        ("//", "names no ref after"),
    ],
)
def test_what_is_wrong_is_said_in_a_sentence(rest: str, message: str) -> None:
    """With what to write instead; without the secrets of the location."""
    with pytest.raises(InvalidInputError, match=message) as caught:
        IcechunkURL.parse(f"s3://user:hidden@b/r?token=hidden|icechunk:{rest}")
    assert "hidden" not in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("location", ["", "a|b"])
def test_a_location_is_needed(location: str) -> None:
    """And has no bar."""
    with pytest.raises(InvalidURLError, match="begins with the URL of a repository"):
        IcechunkURL(location)
    with pytest.raises(InvalidURLError, match="begins with the URL of a repository"):
        IcechunkURL.parse(f"{location}|icechunk:")


@pytest.mark.parametrize(
    ("rest", "read", "written"),
    [
        ("", "main", "main"),
        ("g", "main", "main"),
        ("@branch.dev/g", "dev", "dev"),
        ("@tag.v1", None, None),
        (f"@{ID}", None, None),
        ("@as-of.2026-01-31", "main", None),
        ("@branch.dev@as-of.2026-01-31", "dev", None),
    ],
)
def test_the_branch_that_a_url_reads_and_writes(
    rest: str, read: str | None, written: str | None
) -> None:
    """Only the tip of a branch is written."""
    url = IcechunkURL.parse(f"s3://b/r|icechunk:{rest}")
    assert url.read_branch == read
    if written is not None:
        assert url.written_branch() == written
    else:
        with pytest.raises(InvalidInputError, match=r"nobody changes.*give a URL with @branch"):
            url.written_branch()


def test_secrets_are_not_shown() -> None:
    """A user, a password and a query stay out of the repr; the URL has them."""
    url = IcechunkURL.parse("https://user:secret@host/r?sig=hidden|icechunk:@tag.v1/g")
    assert "secret" in str(url)
    assert "hidden" in str(url)
    assert "secret" not in repr(url)
    assert "hidden" not in repr(url)
    assert "host/r" in repr(url)
    assert "@tag.v1/g" in repr(url)


@pytest.mark.parametrize(
    "text", ["s3://b/r", "a|b", "a|icechunks:", "s3://b|zip:", b"|icechunk:", None]
)
def test_paths_and_other_urls_are_not_taken_for_icechunk_urls(text: object) -> None:
    """Paths with bars stay paths."""
    assert not is_icechunk_url(text)
