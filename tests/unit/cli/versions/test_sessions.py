"""``sessions`` and ``end-session``."""

from __future__ import annotations

import asyncio
from datetime import datetime, timedelta
from typing import TYPE_CHECKING

from icechunk_async import Repository
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
