"""``transactions`` and ``forget-transactions``."""

from __future__ import annotations

import asyncio
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING

from icechunk_async import Repository, Transaction
from tests.unit.cli.conftest import run

if TYPE_CHECKING:
    from pathlib import Path


async def _commit(directory: Path) -> None:
    async with Repository.open(directory) as repository:
        for name, version in (("daily", 3), ("hourly \x1b[31m", 9)):
            session = await repository.writable_session("main")
            await session.commit(name, allow_empty=True, once=Transaction(name, version))


def test_transactions_are_shown_and_forgotten(repository: Path) -> None:
    """Also for people, with control characters escaped; unknown names are refused."""
    assert "No transaction of main is known." in run("transactions", repository).stdout
    asyncio.run(_commit(repository))
    found = run("transactions", repository, "--json").json
    assert found["branch"] == "main"
    versions = {it["app_id"]: it["version"] for it in found["transactions"]}
    assert versions == {"daily": 3, "hourly \x1b[31m": 9}
    at = datetime.fromisoformat(found["transactions"][0]["committed_at"])
    assert abs(datetime.now(UTC) - at) < timedelta(minutes=5)
    shown = run("transactions", repository, "--branch", "main").stdout
    assert "daily" in shown
    assert "\x1b[31m" not in shown

    unknown = run("forget-transactions", repository, "weekly")
    assert unknown.exit_code == 1
    assert "'weekly'" in unknown.stderr
    forgotten = run("forget-transactions", repository, "hourly \x1b[31m", "--json").json
    assert forgotten["app_ids"] == ["hourly \x1b[31m"]
    assert "daily" in run("forget-transactions", repository, "daily").stdout
    assert run("transactions", repository, "--json").json["transactions"] == []
