"""Translate a repository's stored settings into the policies of its storage.

The storage room knows nothing of formats, and the stored configuration nothing of storages: this
module is where the two meet.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from icechunk_async.storage.policies.values import CoalescePolicy, Policies, RetryPolicy

if TYPE_CHECKING:
    from icechunk_async.format.config import StorageSettings
    from icechunk_async.storage.policies.hedge import HedgePolicy

__all__ = ["policies_of"]


def policies_of(settings: StorageSettings, hedge: HedgePolicy | None = None) -> Policies:
    """Return the policies that ``settings`` describe.

    Hedging has no field in the stored configuration of the official engine, so it is an
    argument of opening the repository.
    """
    retries = settings.effective_retries
    total_ms = settings.effective_timeouts.operation_timeout_ms
    concurrency = settings.effective_concurrency
    return Policies(
        CoalescePolicy(
            part_bytes=concurrency.effective_ideal_concurrent_request_size,
            max_parts=concurrency.effective_max_concurrent_requests_for_object,
        ),
        RetryPolicy(
            max_tries=retries.effective_max_tries,
            initial_seconds=retries.effective_initial_backoff_ms / 1000,
            max_seconds=retries.effective_max_backoff_ms / 1000,
            total_seconds=None if total_ms is None else total_ms / 1000,
        ),
        hedge,
    )
