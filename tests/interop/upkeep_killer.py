"""A program that kills its children while they copy, bring copies up to date, and repair.

It leaves the directories for others to look at. It is run on its own because it forks.
"""

from __future__ import annotations

import importlib
import json
import sys
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from icechunk_async import Repository, upkeep
from icechunk_async.credentials import LocalFileSystemAccess
from icechunk_async.storage import open_storage
from tests.killing import FAST, WRITES, Killing, kills

if TYPE_CHECKING:
    from icechunk_async.storage import Storage

__all__ = ["REPAIR", "repair"]

REPAIR = "repair"
"""In place of the arguments of `Repository.copy_to`."""

for _module in ("engine.upkeep.copying.copy", "engine.upkeep.integrity.verify", "zarr.export"):
    importlib.import_module(f"icechunk_async.{_module}")  # here, so that no child has to
importlib.import_module("icechunk_async_local.storage")


async def repair(location: Path | Storage) -> None:
    """Repair like ``icechunk-async repair --apply``, twice if it restores the ``repo`` object."""
    await upkeep.restore_repo_object(location, dry_run=False)
    async with Repository.open(location) as repository:
        plan = await repository.plan_repair(await repository.verify("sums"))
        assert plan.unrepairable == ()
        await plan.apply()


async def scenario(work: str, origin: Path, root: Path, place: int) -> None:
    """Die at a place among the writes to a directory."""
    async with open_storage(root, **FAST) as plain:
        killing = Killing(plain, place, of=WRITES)
        if work == REPAIR:
            await repair(killing)
            return
        options: dict[str, Any] = json.loads(work)
        access = {f"{(origin.parent / 'sources').as_uri()}/": LocalFileSystemAccess()}
        async with Repository.open(origin, authorize_virtual_chunk_access=access) as repository:
            await repository.copy_to(killing, **options)


def main(work: str, origin: Path, fresh: Path, first: int, step: int) -> None:
    """Kill at every ``step``-th place from ``first`` on, until the work comes to its end."""
    for root, died in kills(fresh, partial(scenario, work, origin), first, step):
        if not died:
            root.rename(root.with_name("not-killed"))


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), Path(sys.argv[3]), int(sys.argv[4]), int(sys.argv[5]))
