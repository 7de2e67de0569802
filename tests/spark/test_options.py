"""The table of options: what it accepts, what it refuses, and the page written from it."""

from __future__ import annotations

import pytest
from tools import spark_options

from icechunk_async.errors import InvalidInputError
from icechunk_async.spark.options import (
    OPTIONS,
    ReadOptions,
    StreamOptions,
    Use,
    WriteOptions,
    parse_options,
)

URL = "memory://options"


def test_reference_page_is_current() -> None:
    """If this fails, run `python -m tools.spark_options`."""
    assert spark_options.PAGE.read_text(encoding="utf-8") == spark_options.render()


@pytest.mark.parametrize(
    ("use", "given", "meant"),
    [
        (Use.READ, "brnch", "branch"),
        (Use.READ, "snapshotid", "snapshot-id"),
        (Use.READ_STREAM, "starting-snapshots", "starting-snapshot"),
        (Use.WRITE, "txnapid", "txnAppId"),
    ],
)
def test_misspelt_option_is_refused_with_a_suggestion(use: Use, given: str, meant: str) -> None:
    """Names are compared without case, and suggested in their documented form."""
    with pytest.raises(InvalidInputError, match=f"Unknown option '{given}'.*mean '{meant}'"):
        parse_options({"path": URL, given: "x"}, use)


def test_an_unknown_option_of_a_stream_is_told_those_of_streams() -> None:
    """Spark asks for the columns of a stream as of a batch, before it says that it is one."""
    with pytest.raises(InvalidInputError, match=r"spark\.readStream.* of streams alone .*changes"):
        parse_options({"path": URL, "maximum": "1"}, Use.READ)
    with pytest.raises(InvalidInputError, match="mean 'max-commits-per-trigger'"):
        parse_options({"path": URL, "max-commits-trigger": "1"}, Use.READ)
    with pytest.raises(InvalidInputError) as caught:
        parse_options({"path": URL, "maximum": "1"}, Use.WRITE)
    assert "alone" not in str(caught.value)


@pytest.mark.parametrize(
    ("use", "name"),
    [(Use.READ, "append-dim"), (Use.READ, "changes"), (Use.READ_STREAM, "tag"), (Use.WRITE, "tag")],
)
def test_option_of_another_use_is_refused(use: Use, name: str) -> None:
    """The message names the use for which it is."""
    with pytest.raises(InvalidInputError, match=f"'{name}' does not go with"):
        parse_options({"path": URL, name: "x"}, use)


def test_case_and_aliases_of_names_do_not_matter() -> None:
    """Spark hands options over in lower case, and users of other formats write `appId`."""
    given = WriteOptions.parse({"PATH": URL, "appid": "me", "TxnVersion": "3"})
    assert (given.app_id, given.version) == ("me", 3)


def test_every_default_is_the_default_of_its_request() -> None:
    """The table and the dataclasses cannot disagree."""
    read = ReadOptions.parse({"path": URL})
    assert read == ReadOptions(read.url)
    stream = StreamOptions.parse({"path": URL})
    assert stream == StreamOptions(read, "main", "earliest", None, every_change=False)
    write = WriteOptions.parse({"path": URL})
    assert write == WriteOptions(write.storage)


def test_a_repository_must_be_named() -> None:
    """The message has the method that takes it."""
    for use, method in ((Use.READ, "load"), (Use.WRITE, "save")):
        with pytest.raises(InvalidInputError, match=f"No repository.*{method}"):
            parse_options({}, use)


def test_names_are_distinct_in_lower_case() -> None:
    """Two options with one key would hide each other."""
    keys = [key for it in OPTIONS for key in it.keys]
    assert len(keys) == len(set(keys))


def test_a_url_is_taken_apart_into_options() -> None:
    """One that contradicts it is refused."""
    read = ReadOptions.parse({"path": f"{URL}/|icechunk:@tag.v1/g", "group": "h"})
    assert (read.url, read.tag, read.group) == (URL, "v1", "g/h")
    read = ReadOptions.parse({"path": f"{URL}/|icechunk:@as-of.2026-01-31T12:00Z/g/h"})
    assert read.as_of is not None
    assert read.as_of.isoformat() == "2026-01-31T12:00:00+00:00"
    assert ReadOptions.parse({"path": URL, "ref": "main~1"}).ref == "main~1"
    with pytest.raises(InvalidInputError, match=r"the option 'ref' one more\. Give one"):
        ReadOptions.parse({"path": f"{URL}/|icechunk:@tag.v1", "ref": "main"})
    with pytest.raises(InvalidInputError, match=r"the option 'branch' one more\. Give one"):
        ReadOptions.parse({"path": f"{URL}/|icechunk:@tag.v1", "branch": "main"})
    with pytest.raises(InvalidInputError, match=r"'tag' and 'ref' name one state each"):
        ReadOptions.parse({"path": URL, "tag": "v1", "ref": "main"})
    stream = StreamOptions.parse({"path": f"{URL}/|icechunk:@branch.main/g/h"})
    assert (stream.branch, stream.read.group) == ("main", "g/h")
    with pytest.raises(InvalidInputError, match="names 'tag' 'v1', which cannot be given here"):
        StreamOptions.parse({"path": f"{URL}/|icechunk:@tag.v1"})
