"""The commands `analyze` and `aggregate`."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import zarr

from icechunk_async.sync import Repository
from tests.unit.cli.conftest import run

if TYPE_CHECKING:
    from pathlib import Path

BAD = "z[red]\x1b[31m\x9b2J"


def test_text_is_an_answer_that_does_not_steer_the_terminal(tmp_path: Path) -> None:
    """For people it is escaped; as JSON it is the text."""
    repository = Repository.create(str(tmp_path / "r"))
    session = repository.writable_session("main")
    data = np.array(["a", BAD], np.dtypes.StringDType())
    zarr.create_array(session.store, name="words", data=data, chunks=(1,))
    session.commit("words")
    analyzed = run("analyze", tmp_path / "r", "--json").json
    assert (analyzed["arrays"], analyzed["chunks"], analyzed["left_out"]) == (1, 2, [])
    found = run("aggregate", tmp_path / "r", "words", "max", "--json").json
    assert (found["value"], found["count"], found["chunks_read"]) == (BAD, 2, 0)
    shown = run("aggregate", tmp_path / "r", "words", "max").stdout
    assert "z[red]" in shown
    assert not {"\x1b", "\x9b"} & set(shown)
