"""The order in which an opened repository puts policies around its storage.

Outermost first: coalesce, hedge, retry, limit, observe, backend. The cache goes around all of
them, because a cached read must not wait for the budget.

* Coalescing comes first, so that joined reads are counted, hedged and sent once.
* Hedging goes around retrying: a request that is slow because it pauses between tries is slow.
* Each try takes its own place of the budget, and a pause between tries holds none.
* The budget is next to the backend: it sees every refusal, and counts requests that are sent
  rather than reads that are asked for.

Storages that read without an event loop (memory and local disks) are only limited. They neither
throttle nor lose replies, and joining or splitting their reads costs more than it saves.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from icechunk_async._runtime import telemetry
from icechunk_async.storage.policies.limit import Limited
from icechunk_async.storage.protocol import BlockingStorage

if TYPE_CHECKING:
    from collections.abc import Callable

    from icechunk_async.storage.policies.limit import Budget
    from icechunk_async.storage.policies.values import Policies, RetryPolicy
    from icechunk_async.storage.protocol import Storage

__all__ = ["traced", "with_policies", "with_retries"]


def with_policies(
    storage: Storage, budget: Budget, policies: Policies, *, immutable: Callable[[str], bool]
) -> Storage:
    """Wrap a storage in its policies.

    Args:
        storage: the backend, or what a user has wrapped it in.
        budget: limits the concurrent requests; storages may share one.
        policies: what each policy is told.
        immutable: returns whether the object of a key is only ever written with the same bytes.
    """
    limited = Limited(traced(storage), budget)
    # Each further wrapper would take away that it answers without a loop, see `PassingStorage`.
    if isinstance(storage, BlockingStorage):
        return limited
    from icechunk_async.storage.policies.coalesce import Coalescing  # noqa: PLC0415 -- on use
    from icechunk_async.storage.policies.retry import Retrying  # noqa: PLC0415 -- on use

    reads: Storage = Retrying(limited, policies.retry, immutable=immutable)
    if policies.hedge is not None:
        from icechunk_async.storage.policies.hedge import Hedged  # noqa: PLC0415 -- on use

        reads = Hedged(reads, immutable, policies.hedge)
    return Coalescing(reads, policies.coalesce)


def with_retries(storage: Storage, retry: RetryPolicy) -> Storage:
    """Wrap a storage for the first reads, before the repository's own settings are known."""
    if isinstance(storage, BlockingStorage):
        return storage
    from icechunk_async.storage.policies.retry import Retrying  # noqa: PLC0415 -- on use

    return Retrying(storage, retry)


def traced(storage: Storage) -> Storage:
    """Wrap a storage so that its requests are traced; return it unchanged if nothing listens."""
    if not telemetry.is_listening():
        return storage
    from icechunk_async.storage.policies.observe import (  # noqa: PLC0415 -- on use
        Observations,
        Observed,
        RequestTracer,
    )

    return Observed(storage, Observations([RequestTracer()]))
