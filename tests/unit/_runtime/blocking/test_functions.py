"""Functions of users that may block."""

from __future__ import annotations

from anyio import fail_after, from_thread, to_thread

from icechunk_async._runtime.blocking.functions import unblocked


async def test_plain_functions_wait_for_no_other() -> None:
    """They wait for work that is done in threads, and could take all that there are."""
    to_thread.current_default_thread_limiter().total_tokens = 1

    def work(_: object) -> None:
        from_thread.run(to_thread.run_sync, lambda: None)

    with fail_after(240):
        await unblocked(work)(None)
