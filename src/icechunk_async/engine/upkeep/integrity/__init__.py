"""Integrity: look whether a repository is what it should be, and mend what is not.

`verify` runs the levels in order: `structure` reads references, snapshots, logs and manifests,
`objects` looks for what they refer to, `contents` reads chunks. `report` is what all of them fill
in, and `state` lets an interrupted run continue.
"""
