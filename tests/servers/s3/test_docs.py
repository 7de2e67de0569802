"""The examples of the documentation run, on this server."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

from tests.docs.run_page import REPOSITORY, blocks

if TYPE_CHECKING:
    from tests.servers.s3.running import Server


async def test_the_examples_run(ministack_server: Server) -> None:
    """The test calls them as a reader would."""
    names: dict[str, Any] = {}
    for _, language, text in blocks(REPOSITORY / "docs" / "how-to" / "s3.md"):
        if language == "python":
            exec(text, names)  # noqa: S102 - our own documentation
    bucket = await asyncio.to_thread(ministack_server.bucket)
    options = ministack_server.options()
    assert await names["begin"](f"s3://{bucket}/climate", **options) == {"main"}

    async def fetch() -> tuple[str, str, None]:
        return str(options.pop("access_key_id")), str(options.pop("secret_access_key")), None

    rest = {name: options[name] for name in ("endpoint_url", "region", "allow_http")}
    read = names["read_with_own_keys"]
    assert await read(fetch, f"s3://{bucket}/climate", **rest) == {"main"}
