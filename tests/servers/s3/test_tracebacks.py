"""Tracebacks of programs that use the blocking facade with a bucket that does not exist."""

from __future__ import annotations

import os
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from pathlib import Path

    from tests.servers.s3.running import Server

_LINES = 10
_SCRIPT = """
import sys
import icechunk_async.sync as ic

storage = ic.s3_storage(
    bucket="no-such-bucket", prefix="repo", endpoint_url=sys.argv[1], allow_http=True,
    region="us-east-1", access_key_id="AKIAIOSFODNN7EXAMPLE", secret_access_key="not-a-secret",
)
"""


@pytest.mark.parametrize("call", ["create", "open", "exists"])
def test_a_missing_bucket_is_one_sentence(moto_server: Server, tmp_path: Path, call: str) -> None:
    """Below the line of the script; no frame of the backend, of aiobotocore or of the engine."""
    line = f"ic.Repository.{call}(storage)"
    (tmp_path / "script.py").write_text(_SCRIPT + line + "\n", encoding="utf-8")
    done = subprocess.run(
        [sys.executable, "script.py", moto_server.endpoint],
        cwd=tmp_path,
        env={key: it for key, it in os.environ.items() if key != "PYTHONWARNDEFAULTENCODING"},
        capture_output=True,
        encoding="utf-8",
        check=False,
    )
    lines = done.stderr.splitlines()
    assert len(lines) <= _LINES
    assert f"    {line}" in lines
    assert len([it for it in lines if "There is no bucket 'no-such-bucket'; create it" in it]) == 1
    assert lines[-1].startswith("icechunk_async.sync.StorageError: ")
