"""The policies that an opened repository puts around its storage, and in which order.

Outermost first: coalesce, retry, limit, and last the backend. A read is joined with others before
anything is counted or sent. Each try takes its own place of the budget, and a pause between tries
holds none. The budget is next to the backend: it hears of each refusal, and counts what is
sent, not what is asked for.

Storages that answer without an event loop, memory and local disks, are only limited: they neither
throttle nor lose answers, and joining and splitting their reads costs more than it saves.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from icechunk_async.format.layout import is_written_once
from icechunk_async.storage import BlockingStorage
from icechunk_async.storage.policies.coalesce import CoalescePolicy, Coalescing
from icechunk_async.storage.policies.limit import Limited
from icechunk_async.storage.policies.observe import traced
from icechunk_async.storage.policies.retry import Retrying, RetryPolicy

if TYPE_CHECKING:
    from collections.abc import Callable

    from icechunk_async.format.config import StorageSettings
    from icechunk_async.storage import Storage
    from icechunk_async.storage.policies.limit import Budget

__all__ = ["retry_policy", "with_policies", "with_retries"]


def with_policies(
    storage: Storage,
    budget: Budget,
    settings: StorageSettings,
    *,
    immutable: Callable[[str], bool] = is_written_once,
) -> Storage:
    """Wrap a storage as its settings say, its requests counting against ``budget``."""
    limited = Limited(traced(storage), budget)
    if isinstance(storage, BlockingStorage):
        return limited
    retrying = Retrying(limited, retry_policy(settings), immutable=immutable)
    concurrency = settings.effective_concurrency
    return Coalescing(
        retrying,
        CoalescePolicy(
            part_bytes=concurrency.effective_ideal_concurrent_request_size,
            max_parts=concurrency.effective_max_concurrent_requests_for_object,
        ),
    )


def with_retries(storage: Storage, settings: StorageSettings) -> Storage:
    """Wrap a storage for the first reads, before its repository's own settings are known."""
    if isinstance(storage, BlockingStorage):
        return storage
    return Retrying(storage, retry_policy(settings))


def retry_policy(settings: StorageSettings) -> RetryPolicy:
    """Return what the settings say about repeating requests."""
    retries = settings.effective_retries
    total_ms = settings.effective_timeouts.operation_timeout_ms
    return RetryPolicy(
        max_tries=retries.effective_max_tries,
        initial_seconds=retries.effective_initial_backoff_ms / 1000,
        max_seconds=retries.effective_max_backoff_ms / 1000,
        total_seconds=None if total_ms is None else total_ms / 1000,
    )
