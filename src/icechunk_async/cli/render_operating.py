"""Showing what the commands for operators answer; as in :mod:`icechunk_async.cli.render`."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

from rich.filesize import decimal
from rich.text import Text

from icechunk_async.cli.console import one_line, plain
from icechunk_async.cli.render import REMOVED, SNAPSHOT, make_table, time_of

if TYPE_CHECKING:
    from rich.console import Console

    from icechunk_async.cli.operating_documents import (
        Checked,
        Collected,
        Compacted,
        Configuration,
        Expired,
        Migrated,
        Operations,
        Rewritten,
        State,
        Usage,
        Volume,
    )

__all__ = [
    "checked",
    "collected",
    "configuration",
    "expired",
    "migrated",
    "operations",
    "rewritten",
    "state",
    "usage",
    "volume",
]


def usage(document: Usage, console: Console) -> None:
    """Show one line an array, and the sum."""
    table = make_table("ARRAY", "CHUNKS", "NATIVE", "VIRTUAL", "INLINE")
    for column in table.columns[1:]:
        column.justify = "right"
    for it in document.arrays:
        sizes = (it.native_bytes, it.virtual_bytes, it.inline_bytes)
        table.add_row(plain(it.path), f"{it.chunks:,}", *map(decimal, sizes))
    sums = (document.native_bytes, document.virtual_bytes, document.inline_bytes)
    chunks = sum(it.chunks for it in document.arrays)
    table.add_row(Text("all", "bold"), f"{chunks:,}", *map(decimal, sums))
    console.print(table)


def volume(document: Volume, console: Console) -> None:
    """Show counts and sizes."""
    table = make_table("", "", header=False)
    table.add_row("repository", plain(document.url))
    table.add_row("format version", str(document.spec_version))
    table.add_row("branches", f"{document.branches:,}")
    table.add_row("tags", f"{document.tags:,}")
    table.add_row("snapshots", f"{document.snapshots:,}")
    table.add_row("native chunks", decimal(document.native_bytes))
    table.add_row("virtual chunks", decimal(document.virtual_bytes))
    table.add_row("inline chunks", decimal(document.inline_bytes))
    console.print(table)


def operations(document: Operations, console: Console) -> None:
    """Show one line an operation."""
    table = make_table("DONE (UTC)", "OPERATION", "")
    for it in document.operations:
        detail = ", ".join(f"{key} {value}" for key, value in it.detail.items())
        table.add_row(time_of(it.updated_at), it.kind, plain(one_line(detail)))
    console.print(table)


def configuration(document: Configuration, console: Console) -> None:
    """Show the document."""
    if document.changed:
        console.print("Stored:")
    console.print_json(data=document.config, ensure_ascii=False)


def state(document: State, console: Console) -> None:
    """Show whether a repository may be changed, and what else is known of it."""
    table = make_table("", "", header=False)
    table.add_row("repository", plain(document.url))
    table.add_row("format version", str(document.spec_version))
    style = "" if document.availability == "online" else REMOVED
    table.add_row("availability", Text(document.availability.replace("_", " "), style))
    if document.reason is not None:
        table.add_row("reason", plain(one_line(document.reason)))
    if document.set_at is not None:
        table.add_row("since", time_of(document.set_at))
    table.add_row("branches", f"{document.branches:,}")
    table.add_row("tags", f"{document.tags:,}")
    for name, enabled in sorted(document.feature_flags.items()):
        table.add_row(plain(name), "enabled" if enabled else Text("disabled", REMOVED))
    for name, value in sorted(document.metadata.items()):
        table.add_row(plain(name), plain(json.dumps(value, ensure_ascii=False)))
    console.print(table)


def expired(document: Expired, console: Console) -> None:
    """Show how many snapshots went, and which."""
    for it in document.snapshots:
        console.print(Text(it, SNAPSHOT))
    verb = "would be dropped" if document.dry_run else "dropped"
    when = f"{document.older_than:%Y-%m-%d %H:%M:%S} UTC"
    count = len(document.snapshots)
    console.print(f"{count:,} snapshot(s) from before {when} {verb}.", soft_wrap=True)


def collected(document: Collected, console: Console) -> None:
    """Show what was deleted, by kind."""
    table = make_table("", "", header=False)
    table.columns[1].justify = "right"
    table.add_row("chunks", f"{document.chunks_deleted:,}")
    table.add_row("manifests", f"{document.manifests_deleted:,}")
    table.add_row("snapshots", f"{document.snapshots_deleted:,}")
    table.add_row("transaction logs", f"{document.transaction_logs_deleted:,}")
    console.print(table)
    for it in document.failures:
        text = Text.assemble(("Could not delete ", REMOVED), plain(it.key), ": ", plain(it.reason))
        console.print(text, soft_wrap=True)
    verb = "would be freed" if document.dry_run else "freed"
    console.print(f"{decimal(document.bytes_deleted)} {verb}.")


def checked(document: Checked, console: Console) -> None:
    """Show what was looked for, and what is not as it must be."""
    table = make_table("", "", header=False)
    table.columns[1].justify = "right"
    table.add_row("snapshots", f"{document.snapshots:,}")
    table.add_row("transaction logs", f"{document.transaction_logs:,}")
    table.add_row("manifests", f"{document.manifests:,}")
    table.add_row("chunk objects", f"{document.chunk_objects:,}")
    table.add_row("virtual objects", f"{document.virtual_objects:,}")
    console.print(table)
    for it in document.broken:
        text = Text.assemble((f"{it.problem} ", REMOVED), plain(it.kind), ": ", plain(it.detail))
        console.print(text, soft_wrap=True)
    if document.virtual_not_authorized:
        console.print(
            f"{document.virtual_not_authorized:,} virtual object(s) were not looked at. If you "
            "trust their containers, add --authorize with their URL prefixes."
        )
    console.print("Something is broken." if document.broken else "Nothing is missing.")


def rewritten(document: Rewritten, console: Console) -> None:
    """Show the new snapshot."""
    console.print(
        Text.assemble(
            plain(document.branch, "green"),
            " is at ",
            (document.snapshot_id, SNAPSHOT),
            f" now, with {document.manifests:,} manifest(s); it was at ",
            (document.previous_snapshot_id, SNAPSHOT),
            ".",
        ),
        soft_wrap=True,
    )


def compacted(document: Compacted, console: Console) -> None:
    """Show what moved, and what may become free."""
    verb = "would be" if document.dry_run else "were"
    console.print(
        f"{document.chunks:,} chunk(s), {decimal(document.bytes_written)}, of "
        f"{document.objects:,} object(s) {verb} written anew; the objects take "
        f"{decimal(document.bytes_released)}.",
        soft_wrap=True,
    )
    if document.snapshot_id is not None:
        text = Text.assemble(
            plain(document.branch, "green"),
            " is at ",
            (document.snapshot_id, SNAPSHOT),
            " now. Space is freed by expire and gc.",
        )
        console.print(text, soft_wrap=True)


def migrated(document: Migrated, console: Console) -> None:
    """Show what was carried over."""
    verb = "can be migrated" if document.dry_run else "is of format version 2 now"
    if document.already_migrated:
        verb = "was of format version 2 already"
    text = (
        f" {verb}: {document.branches:,} branch(es), {document.tags:,} tag(s) and "
        f"{document.snapshots:,} snapshot(s)."
    )
    console.print(Text.assemble(plain(document.url, "bold"), text), soft_wrap=True)
