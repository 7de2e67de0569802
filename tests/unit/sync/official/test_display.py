"""Displays of values that came out of a repository do no harm on a terminal or in a notebook."""

from __future__ import annotations

import xml.etree.ElementTree as ET
from datetime import UTC, datetime
from typing import Any

import pytest

from icechunk_async.errors import RepositoryReadOnlyError
from icechunk_async.sync import (
    Conflict,
    ConflictType,
    Diff,
    RepoAvailability,
    Repository,
    RepositoryConfig,
    RepoStatus,
    SnapshotInfo,
    StorageSettings,
    Update,
    UpdateType,
    VirtualChunkContainer,
    in_memory_storage,
    s3_store,
)

BAD = "x\x1b[31m\x9b2J\r\u202e\0y"
NOW = datetime(2024, 1, 1, tzinfo=UTC)
CONFIG = RepositoryConfig(
    storage=StorageSettings(storage_class=BAD),
    virtual_chunk_containers={
        f"s3://{BAD}/": VirtualChunkContainer(f"s3://{BAD}/", s3_store(region=BAD), BAD)
    },
)
VALUES: dict[str, Any] = {
    "snapshot": SnapshotInfo("id", None, NOW, f"first\n{BAD}", {BAD: BAD}),
    "diff": Diff({BAD}, {BAD}, {BAD}, {BAD}, {BAD}, {BAD}, {BAD: [[0]]}, [(BAD, BAD)]),
    "status": RepoStatus(RepoAvailability.read_only, NOW, BAD),
    "update": Update(UpdateType.TagCreated(BAD), NOW, BAD),
    "kind": UpdateType.BranchReset(BAD, BAD),
    "conflict": Conflict(ConflictType.ChunkDoubleUpdate, f"/{BAD}\n", [[0]]),
    "config": CONFIG,
}


@pytest.mark.parametrize("value", VALUES.values(), ids=VALUES)
def test_displays_show_control_characters_escaped(value: Any) -> None:
    """All of them; the lines of a message stay apart."""
    shown = [str(value), repr(value)]
    if hasattr(value, "_repr_html_"):
        shown.append(value._repr_html_())
    for text in shown:
        assert all(line.isprintable() for line in text.split("\n"))
        assert "1b[31m" in text


def test_a_path_cannot_feign_a_line() -> None:
    """A message may have several; names and paths are on one."""
    for value in (Diff({"/a\nArrays deleted:"}), VALUES["conflict"]):
        assert "\\n" in str(value)
        assert "\nArrays deleted" not in str(value)


def test_names_and_messages_of_others_do_no_harm_when_history_is_drawn() -> None:
    """As text and as SVG, which stays well-formed; nor does the branch of a session."""
    name = "x\x1b[31m\x9b2J\u202e"
    with Repository.create(in_memory_storage()) as repository:
        repository.create_branch(name, repository.lookup_branch("main"))
        repository.create_tag(f"tag {name}", repository.lookup_branch("main"))
        repository.writable_session(name).commit(f"message {name}", allow_empty=True)
        graph = repository.ancestry_graph(plain=True)
        session = repository.writable_session(name)
        for text in (str(graph), str(session), repr(session.store), repr(graph)):
            assert all(line.isprintable() for line in text.split("\n"))
        drawing = ET.fromstring(graph.svg())  # noqa: S314 - it is ours
        assert all(it.isprintable() for it in "".join(drawing.itertext()).split("\n"))
        coloured = str(repository.ancestry_graph(plain=False))
        assert "\x1b[31m" not in coloured
        assert coloured.count("\\x1b[31m") == 3


def test_the_reason_of_a_refusal_does_no_harm() -> None:
    """Another writer, who closed the repository, gave it."""
    with Repository.create(in_memory_storage()) as repository:
        repository.set_status(RepoStatus(RepoAvailability.read_only, NOW, BAD))
        with pytest.raises(RepositoryReadOnlyError) as caught:
            repository.writable_session("main")
        assert str(caught.value).isprintable()
        assert "x1b[31m" in str(caught.value)
