"""Work with versions: what differs between two snapshots, taking back, bringing back, merging.

`differences` compares any two snapshots by reference, so that cost follows what differs. `combine`
turns differences into changes that a session commits. Behind `Repository.revert`, `restore`,
`merge` and their like.
"""
