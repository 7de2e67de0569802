"""Deletions: one small request a key, several at a time, each with an answer of its own."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from icechunk_async.errors import IcechunkError, ObjectNotFoundError, StorageClosedError
from icechunk_async.storage import DeleteFailure
from icechunk_async_azure.parallel import for_each

if TYPE_CHECKING:
    from collections.abc import Iterable

    from icechunk_async_azure.requests import Requests

__all__ = ["delete"]

_AT_ONCE: Final = 16


async def delete(requests: Requests, keys: Iterable[str]) -> list[DeleteFailure]:
    """Delete objects; answer those that could not be deleted, in the order of ``keys``."""
    names = {key: requests.name(key) for key in keys}  # all are checked before one is deleted
    if not names:
        requests.clients.check_open()
        return []
    failures: dict[str, IcechunkError] = {}

    async def delete_one(key: str) -> None:
        try:
            client = await requests.client("delete", key)
            request: Any = client.blob(names[key]).delete_blob()
            await requests.ask(request, "delete", key=key)
        except ObjectNotFoundError:
            pass
        except StorageClosedError:
            raise
        except IcechunkError as error:
            failures[key] = error

    await for_each(delete_one, names, limit=min(_AT_ONCE, len(names)))
    return [DeleteFailure(key, failures[key]) for key in names if key in failures]
