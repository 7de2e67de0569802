"""Verification through the blocking facade."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import zarr

from icechunk_async.sync import Repository, local_filesystem_storage

if TYPE_CHECKING:
    from pathlib import Path


def test_verify_blocks_and_reports(tmp_path: Path) -> None:
    """The report is that of the native method."""
    repository = Repository.create(local_filesystem_storage(str(tmp_path / "repo")))
    session = repository.writable_session("main")
    array = zarr.create_array(session.store, name="a", shape=(4000,), chunks=(1000,), dtype="f8")
    array[:] = np.random.default_rng(0).random(4000)
    session.commit("numbers")
    report = repository.verify(sample=2, seed=1)
    assert (report.is_healthy, report.level, report.chunks_read) == (True, "decode", 2)
    victim = min((tmp_path / "repo" / "chunks").iterdir())
    victim.write_bytes(b"")
    (found,) = repository.verify("length").findings
    assert (found.problem, found.location) == ("too short", f"chunks/{victim.name}")
    report = repository.verify("length")
    plan = repository.repair(report)
    assert [it.action for it in plan.steps] == ["drop chunks"]
    assert not repository.verify("length").is_healthy
    repository.repair(report, dry_run=False)
    assert repository.verify(refs=["main"], ancestry=False).is_healthy
