"""The example of the documentation runs, on this server instead of the one that it names."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from azure.core.credentials import AzureNamedKeyCredential
from azure.storage.blob import BlobServiceClient

from tests.servers.azure.azurite_server import ACCOUNT, KEY

if TYPE_CHECKING:
    from tests.servers.azure.azurite_server import Azurite

_PAGE = Path(__file__).parents[3] / "docs" / "how-to" / "azure.md"


def test_the_example_creates_a_repository(azurite: Azurite) -> None:
    """The test runs it as a reader would."""
    page = _PAGE.read_text(encoding="utf-8")
    (example,) = re.findall(r"^```\n(import .*?)^```", page, re.MULTILINE | re.DOTALL)
    with BlobServiceClient(azurite.endpoint, AzureNamedKeyCredential(ACCOUNT, KEY)) as client:
        client.create_container("box")
        address = f"http://127.0.0.1:10000/{ACCOUNT}"
        assert address in example
        program = example.replace(address, azurite.endpoint)
        done = subprocess.run(
            [sys.executable, "-W", "error", "-c", program],
            capture_output=True,
            text=True,
            check=False,
        )
        client.delete_container("box")
    assert (done.stdout.strip(), done.stderr, done.returncode) == ("{'main'}", "", 0)
