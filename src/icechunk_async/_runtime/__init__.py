"""The ground that all other rooms stand on; it imports none of them.

`concurrency` is the only place that starts tasks on a caller's loop. `blocking` has its own loop,
for code that blocks. `clock` is time and randomness, which tests can replace. `backoff` spaces
retries, `weighted_cache` keeps values within a budget, `progress` and `telemetry` report what is
happening.
"""
