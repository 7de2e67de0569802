"""Which module has which command, so that one command does not import all others."""

from __future__ import annotations

from typing import Final

__all__ = ["LISTED"]

_MODULES: Final = (
    ("commands.versions.history", ("init",)),
    ("commands.versions.log", ("log",)),
    ("commands.versions.history", ("show", "diff")),
    ("commands.data.contents", ("tree", "ls", "cat", "du", "stats")),
    ("commands.versions.refs", ("branch", "tag")),
    (
        "commands.versions.merging",
        ("undo", "revert", "restore", "merge", "cherry-pick", "fast-forward", "squash"),
    ),
    (
        "commands.versions.proposals",
        ("propose", "review", "accept", "reject", "protect", "unprotect"),
    ),
    ("commands.versions.changes", ("changes",)),
    ("commands.versions.watch", ("watch", "blame", "diff-values")),
    ("commands.data.serve", ("serve", "publish-static")),
    ("commands.versions.sessions", ("sessions", "end-session")),
    ("commands.versions.transactions", ("transactions", "forget-transactions")),
    ("commands.operate.administration", ("status", "config", "ops", "probe")),
    (
        "commands.operate.upkeep",
        ("expire", "gc", "compact", "rewrite-manifests", "check", "migrate"),
    ),
    ("commands.operate.copies", ("copy", "sync")),
    ("commands.data.ingest", ("ingest",)),
    ("commands.operate.integrity", ("repair", "verify", "sums")),
    ("commands.data.queries", ("analyze", "aggregate")),
    ("commands.data.sql", ("sql",)),
    ("demo.command", ("demo",)),
)

LISTED: Final = {name: module for module, names in _MODULES for name in names}
"""Modules below `icechunk_async.cli` by command, in the order of the help. Each `register` adds its
own, and a test compares."""
