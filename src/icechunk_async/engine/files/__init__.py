"""The immutable files of a repository: load, cache and store them.

`assets.Assets` is what other rooms use: snapshots and transaction logs, and in it `manifests`
(lookups that read as little as possible) and `chunks`. Both have a blocking twin for storages that
answer without an event loop. A `layout.Layout` says how files are named and encoded. `packs` lets
small chunks of a session share objects, `preload` fetches manifests ahead.
"""
