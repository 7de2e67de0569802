"""From a session's changes to a published snapshot.

`publisher.Publisher` commits, amends, flushes and rebases for one session, with `flush` for
manifests, `rebase` for lost races, `inputs` for nodes that others must leave unchanged, and `once`
for exactly-once commits. `forks.Forks` gives other tasks and processes a part of the work and
merges it. `conflicts` is what solvers see and return.
"""
