"""Storages on which an update may bring back what was deleted at the same time."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import pytest

from icechunk_async import Repository
from icechunk_async.errors import UnsafeStorageError
from icechunk_async.storage import open_storage
from icechunk_async.testing.wrapping import WrappedStorage
from tests.helpers import memory_url

if TYPE_CHECKING:
    from icechunk_async.storage import Capabilities


class BringsBack(WrappedStorage):
    """Says so."""

    @property
    def capabilities(self) -> Capabilities:
        """All but one."""
        return replace(
            self.wrapped.capabilities, final_deletion=False, reasons={"final_deletion": "radosgw"}
        )


@pytest.mark.parametrize("spec", [1, 2])
async def test_format_1_deletes_no_branch_that_a_commit_could_bring_back(spec: int) -> None:
    """Format 2 has its branches in one object, which is never deleted."""
    async with (
        open_storage(memory_url()) as plain,
        Repository.create(BringsBack(plain), spec_version=spec) as repository,
    ):
        await repository.create_branch("x", await repository.lookup_branch("main"))
        if spec == 1:
            with pytest.raises(UnsafeStorageError, match=r"radosgw.*format 2"):
                await repository.delete_branch("x")
        else:
            await repository.delete_branch("x")
        assert ("x" in await repository.branches()) is (spec == 1)
