"""Lists of digests: what a snapshot consists of, so that anybody can check it.

The list of a snapshot is a text in the format of ``sha256sum``, beside the sidecars of its
manifests; its own SHA-256 is the content root (docs/reference/chunk-sums.md). So the root vouches
for the list, the list for nodes, manifests and sidecars, and a sidecar for the bytes of chunks.

Apart from `sums`, which every read of a chunk needs; lists are for commits and those who check.
"""

from __future__ import annotations

import hashlib
import json
import re
from dataclasses import field
from typing import TYPE_CHECKING, Final

from icechunk_async._runtime.dataclasses import dataclass
from icechunk_async.errors import FormatError, InvalidInputError
from icechunk_async.format.ids import ManifestId
from icechunk_async.format.layout import manifest_key, sums_key

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from icechunk_async.format.snapshot import Node

__all__ = ["CONTENT_ROOT", "DigestList", "Listed", "node_lines"]

CONTENT_ROOT: Final = "icechunk-async-content-root"
"""The property of a snapshot that holds its content root, in hexadecimal digits."""
_FIRST: Final = "# icechunk-async digests 1"
_DIGEST: Final = re.compile(r"([0-9a-f]{64})  (manifests|sums)/([0-9A-Z]{20})")
_NOTE: Final = re.compile(r"# (unknown manifests|incomplete sums)/([0-9A-Z]{20})")


@dataclass(frozen=True, slots=True)
class Listed:
    """The digests of a manifest and of its sidecar."""

    manifest: bytes
    """SHA-256 of the object of the manifest."""
    sums: bytes | None
    """SHA-256 of its sidecar; None if that lacks sums, so that it may still change."""


@dataclass(frozen=True, slots=True)
class DigestList:
    """The list of one snapshot."""

    nodes: tuple[str, ...]
    """A line for each node, see `node_lines`."""
    manifests: Mapping[ManifestId, Listed | None]
    """Those that the snapshot uses; None: nothing is known of the manifest."""
    data: bytes = field(repr=False)
    """The stored form."""

    @classmethod
    def of(cls, nodes: Iterable[Node], manifests: Mapping[ManifestId, Listed | None]) -> DigestList:
        """Return the list of a snapshot with these nodes and manifests."""
        lines = tuple(node_lines(nodes))
        body = [line for it in sorted(manifests) for line in _manifest_lines(it, manifests[it])]
        text = "".join(f"{line}\n" for line in (_FIRST, *lines, *body))
        return cls(lines, manifests, text.encode())

    @property
    def root(self) -> str:
        """The content root, in hexadecimal digits."""
        return hashlib.sha256(self.data).hexdigest()

    @property
    def is_complete(self) -> bool:
        """Whether the digest of every manifest is in it, so that its root says something."""
        return None not in self.manifests.values()

    @classmethod
    def decode(cls, data: bytes | memoryview) -> DigestList:
        """Read a list.

        Raises:
            FormatError: it is damaged, or of a newer version.
        """
        data = bytes(data)
        try:
            first, *lines = data.decode("ascii").removesuffix("\n").split("\n")
            if first != _FIRST:
                raise _damaged("its first line is another one")
            # Nodes are in lines that begin with `#`, which `sha256sum -c` passes over: it checks
            # files.
            nodes = [line for line in lines if line.startswith(("# array ", "# group "))]
            manifests: dict[ManifestId, Listed | None] = {}
            rest = iter(lines[len(nodes) :])
            for line in rest:
                _read_line(line, rest, manifests)
        except (UnicodeDecodeError, InvalidInputError) as error:
            raise _damaged(str(error)) from error
        return cls(tuple(nodes), manifests, data)


def node_lines(nodes: Iterable[Node]) -> list[str]:
    """Return the lines of a list for nodes, one for each, in the order of their paths."""
    lines: list[str] = []
    for node in sorted(nodes, key=lambda node: node.path):
        digest = hashlib.sha256(node.user_data).hexdigest()
        # In JSON, since a path may hold a line break, by which another line could be forged.
        path = json.dumps(node.path)
        if node.array is None:
            lines.append(f"# group {node.id} {digest} {path}")
            continue
        # Sorted, since the order of an array's manifests means nothing and may differ between
        # engines.
        refs = sorted(
            f"{ref.manifest_id}[{','.join(f'{low}:{high}' for low, high in ref.extents)}]"
            for ref in node.array.manifests
        )
        lines.append(f"# array {node.id} {digest} {';'.join(refs) or '-'} {path}")
    return lines


def _manifest_lines(manifest_id: ManifestId, listed: Listed | None) -> list[str]:
    manifest, sums = manifest_key(manifest_id), sums_key(manifest_id)
    if listed is None:
        # Not left out: a list that says nothing of a manifest would vouch for a snapshot that it
        # does not know.
        return [f"# unknown {manifest}"]
    second = f"# incomplete {sums}" if listed.sums is None else f"{listed.sums.hex()}  {sums}"
    return [f"{listed.manifest.hex()}  {manifest}", second]


def _read_line(line: str, rest: Iterable[str], found: dict[ManifestId, Listed | None]) -> None:
    """Read what a list says of one manifest: one line, or two."""
    note = _NOTE.fullmatch(line)
    if note is not None and note[1] == "unknown manifests":
        found[ManifestId.parse(note[2])] = None
        return
    first, second = _DIGEST.fullmatch(line), next(iter(rest), "")
    sums, note = _DIGEST.fullmatch(second), _NOTE.fullmatch(second)
    about = f"{sums[2]}/{sums[3]}" if sums is not None else second.removeprefix("# incomplete ")
    known = sums is not None or note is not None
    # Two lines belong together: a sidecar of another manifest would vouch for the wrong chunks.
    if not known or first is None or first[2] != "manifests" or about != f"sums/{first[3]}":
        raise _damaged(f"it has the line {line[:100]!r}")
    found[ManifestId.parse(first[3])] = Listed(
        bytes.fromhex(first[1]), None if sums is None else bytes.fromhex(sums[1])
    )


def _damaged(why: str) -> FormatError:
    return FormatError(
        f"The list of a snapshot's digests is damaged: {why}. No data is lost; make it anew with "
        "Repository.add_sums."
    )
