"""Lists of digests: read back what was written, and nothing else."""

from __future__ import annotations

import hashlib

import pytest

from icechunk_async.errors import FormatError
from icechunk_async.format.digests import DigestList, Listed
from icechunk_async.format.ids import ManifestId, NodeId
from icechunk_async.format.snapshot import ArrayData, Dimension, ManifestRef, Node

DIGEST = hashlib.sha256(b"x").digest()


def a_list() -> DigestList:
    """Return a list with every kind of line."""
    ids = [ManifestId(bytes([number] * 12)) for number in range(3)]
    array = ArrayData(
        (Dimension(10, 5), Dimension(4, 2)), None, (ManifestRef(ids[0], ((0, 5), (0, 2))),)
    )
    nodes = [
        Node(NodeId(b"12345678"), '/a "quoted" \n name', b"{}", array),
        Node(NodeId(b"87654321"), "/", b"{}", None),
    ]
    return DigestList.of(
        nodes, {ids[0]: Listed(DIGEST, DIGEST), ids[1]: Listed(DIGEST, None), ids[2]: None}
    )


def test_list_gives_back_what_it_was_made_of() -> None:
    """Also what is unknown, and names with line breaks."""
    made = a_list()
    found = DigestList.decode(made.data)
    assert (found.nodes, found.manifests, found.root) == (made.nodes, made.manifests, made.root)
    assert not found.is_complete
    assert len(made.data.splitlines()) == 1 + 2 + 2 + 2 + 1


@pytest.mark.parametrize(
    "change",
    [
        lambda data: b"",
        lambda data: data.replace(b"digests 1", b"digests 2"),
        lambda data: data.replace(b"  manifests/", b"  chunks/"),
        lambda data: data.replace(b"# incomplete sums/", b"# incomplete manifests/"),
        lambda data: data[: data.rindex(b"\n# incomplete")],
        lambda data: data + b"something else\n",
        lambda data: data + b"\xff",
        lambda data: data.replace(b"# unknown manifests/0", b"# unknown manifests/U"),
    ],
)
def test_damaged_list_is_refused(change: object) -> None:
    """Wherever it is not what a writer writes."""
    assert callable(change)
    with pytest.raises(FormatError, match="digests is damaged"):
        DigestList.decode(change(a_list().data))
