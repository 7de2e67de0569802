"""`sessions` and `end-session`, `transactions` and `forget-transactions`."""

from __future__ import annotations

import asyncio
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING

from icechunk_async import Repository, Transaction
from tests.unit.cli.conftest import run

if TYPE_CHECKING:
    from pathlib import Path


async def _begin(directory: Path) -> str:
    async with Repository.open(directory) as repository:
        await repository.writable_session("main")
        session = await repository.writable_session("main", lease=True, owner="me \x1b[31m")
        return str(session.session_id)


def test_sessions_shows_leases_and_end_session_ends_one(repository: Path) -> None:
    """Also for people, with control characters escaped."""
    assert "No session has a lease." in run("sessions", repository).stdout
    assert run("sessions", repository, "--json").json == {"sessions": []}
    session_id = asyncio.run(_begin(repository))
    (line,) = run("sessions", repository, "--json").json["sessions"]
    assert (line["session_id"], line["state"], line["branch"]) == (session_id, "live", "main")
    assert (line["owner"], line["snapshot_id"], line["segments"]) == ("me \x1b[31m", None, 0)
    held = datetime.fromisoformat(line["expires_at"]) - datetime.fromisoformat(line["heartbeat_at"])
    assert held == timedelta(hours=24)
    shown = run("sessions", repository).stdout
    assert session_id in shown
    assert "\x1b[31m" not in shown
    assert session_id in run("end-session", repository, session_id).stdout
    assert run("sessions", repository, "--json").json["sessions"][0]["state"] == "ended"
    assert run("end-session", repository, session_id, "--json").json == {"session_id": session_id}
    unknown = run("end-session", repository, "0" * 20)
    assert (unknown.exit_code, "lease-not-found" in unknown.stderr) == (1, True)


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
