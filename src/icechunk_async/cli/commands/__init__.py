"""The commands, by kind: functions that return documents, and functions that print them.

`versions` has those about snapshots, refs and what leads to commits, `data` those about what
arrays hold and how it comes in and out, `operate` those that keep a repository healthy. They use
the public library, and of `cli` what all commands share. A module here may use another one's
documents and printing, as `merging` does with those of `history`.
"""
