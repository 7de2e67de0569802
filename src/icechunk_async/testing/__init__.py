"""Tools to test this library and backends by third parties.

`conformance` checks the promises of a storage. `faults`, `latency` and `wrapping` are storages that
fail, delay or count. `proxy` breaks HTTP connections on purpose, `histories` checks what concurrent
writers saw, `virtual_time` makes waiting free, and `cancellation` cancels a coroutine at each of
its waits.
"""
