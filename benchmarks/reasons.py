"""Why an operation misses a target or loses to a peer: what a profile says bounds it.

The documentation shows it below the table of each operation that has such a row.
"""

from __future__ import annotations

from typing import Final

__all__ = ["REASONS"]

REASONS: Final = {
    "Compare, merge, follow and stack versions": """
*Net diff of a commit and the one before it*: the official engine's difference is the log of the
commit, that is, which chunks it touched. Ours also reads both snapshots, looks these chunks up in
both manifests, leaves out those that are the same, and returns the references of the others. Where
the log is enough, ask for `diff`, see *ours, diff*.
""",
    "Import, and open for the first time": """
The official engine is one compiled library. For a first read ours is some 150 modules of 37,000
lines; what writes, lists, decodes whole columns or serves upkeep is imported when it is used.
Loading the compiled code takes a fifth, see the floor, and making classes another. Python
collects garbage once on the way, which is a sixth: it looks at the objects of zarr and NumPy as
well. Without bytecode, compiling takes twice as long as everything else.
*command*: a quarter of the start of `log` is Typer, a fifth asyncio, and most of the rest some 130
dataclasses of ours, three dozen of them for the configuration. NumPy, Rich and entry points are not
loaded, and no garbage is collected.
""",
    "Keep a repository small": """
Expiring is one change of the repository's state. The target is less than writing and syncing one
file takes, see the floor. Ours keeps a backup and waits for the disk twice in a row: for the backup
and the new state together, and for the state's name. Of 2.7 ms, when nobody else has turns, that is
one; the official engine does not wait for the disk. Encoding and compressing the log of 200 entries
is 0.6 ms, three hops between threads as much, and the rest calls of the system for the two files.
Encoding while a thread copies the backup was tried, and took as long.
Collecting is bounded by one call of the operating system for each file: on one thread these calls
alone take longer.
""",
    "Large hierarchies on the local disk": """
Where nodes are few it is the small commit, which waits for the disk and takes some 2,600 calls of
Python functions, and the small repository, of which three files are decoded with bounds checked at
each step. Both cost nearly the same whatever the size of the tree; the official engine decodes and
writes all nodes.
""",
    "Large objects on S3 through zarr": """
Receiving, parsing (aiohttp slices and joins what comes) and Zarr's copy into the array follow
one another on the thread of Zarr's only loop, where compiled clients receive on other threads.
Putting 1 MB takes everybody 1.0 to 1.2 ms of processor time, on two processors that the server
needs, too. Memory counts as much: in a process that has done much else the C library gives it back
after each object and takes it again, see [Memory](../../docs/explanation/performance.md#memory).
Over TLS asyncio reads one record of 16 KB at a time and copies it twice more. `obstore+s3://`
is the way out.
""",
    "List nodes through the store": """
What remains is Zarr's prefix logic and one string for each key, which the interface asks for.
""",
    "Many small arrays, and questions about commits": """
Small arrays share manifests, so files are few, and their references are merged and encoded
together. What is left for each array is a tenth of a millisecond of Python: its node, its shares of
common columns and its place in a manifest. Where arrays are few it is the small commit, which waits
for the disk; the official engine does not.
""",
    "Many writers of one branch": """
A writer that loses a race reads the newer commits, writes its snapshot and log again and retries.
That takes five requests that depend on one another, and 8 ms of processor time for decoding and
encoding, spread over small steps. Processes of one machine queue, so nearly each commit lands at
its first try; each then checks what the seven before it changed. The median wait is that of a fair
queue: of the official engine's processes one commits many times in a row, while the others wait
for up to half a minute. Next to the storage the queue leaves a processor idle while one writer has
its turn.
""",
    "Read arrays through zarr": """
Zarr itself takes half to three quarters of our time of small chunks, whatever the store, see
*zarr alone*. The fused pipeline reads on two threads of one interpreter; chunks that wait for no
disk, such as inline ones, are read in half the time with `codec_pipeline.max_workers` 1. Of the
rest finding the reference, which Zarr's own local store need not, is about as much as opening and
reading the file. Of 1 MB nine tenths are copies, the system's and Zarr's. TensorStore decodes and
copies in compiled threads, without either.
""",
    "Read through the store": """
Each call costs the interpreter 2 to 20 microseconds, of which opening, reading and closing a
file is a third; of 1 MB six tenths are the system's copy out of its cache. Factors shrink where
waking up a thread is cheap, since that is what the official engine pays.
""",
    "References of chunks": """
*Set and commit*: half of the time is compressing the manifest and making sure that each of its
pieces decodes by itself; a sixth is checking and storing a text for each reference. *Native
references*: random ids do not compress, so a third is the compressor's, and a quarter is
copying columns. *Iterate, written by the official engine*: decompressing 68 to 130 MB takes
half of the time or more, see the floor, so that five times would leave 3 ms for everything else
in format 1, and 35 in format 2. Its records follow texts of different lengths, and what
describes them lies behind them: columns are read out of all of it, by an index for each (49
ms). Making lists of paths takes another 10. *Open cold, written by the official engine*: all of
it has to be decompressed, since the first chunk is at its end. *Change one*: ours waits for the
disk, the official engine does not; see *CPU*.
""",
    "Repositories of many snapshots on the local disk": """
*Ancestry, all fields*: an object of Python with its times, texts and metadata is made for each
snapshot, and more than half of the time is decoding metadata; *messages* reads one column. *Change
a chunk and commit*: small commits wait for the disk, and the log of updates is compressed anew.
""",
    "Small chunks that share objects": """
Objects are few; what is left is what Zarr takes for each chunk, see *zarr alone*, and the copy
of each chunk into its pack. Zarr hands over ten chunks at a time by itself:
far away that is what unpacked chunks wait for, and packed ones do not. With 64 at a time the
official engine waits less, and Zarr's own loop is most of ours. The fused pipeline falls back to
that loop on S3.
""",
    "Small repositories on the local disk": """
Two fifths of opening are Zarr's, and a seventh is decoding three small files with bounds checked
at each step. Settings that this process decoded before are not decoded again. Committing waits for
the disk twice, for all files together and for the name of the new state; the official engine does
not wait for it at all.
""",
    "Small requests to S3 through zarr": """
Of 400 to 600 microseconds of processor time, asyncio and aiohttp take more than half, Zarr a
sixth to a quarter, see *zarr alone*, sending a tenth, and our policies, signature and bookkeeping
the rest. The turns of one loop follow one another; the official engine spreads its own over
threads.
""",
    "Storage that is far away": """
*Create*: seven requests, three in a row, in a bucket where this process created another one within
the last hour. The first time there is a trial whether conditional writes work
([decision 11](../../docs/decisions/0011-probe-at-create.md)): eleven requests at AWS, whose
documentation says so, and some 155 at other services. `probe=False` leaves it out, at your risk.
*Open cold*: four requests in a row are 80 ms, and the connection for them another 20. The
first chunk comes over the connection that opened the repository; Zarr's loop makes its own when
it reads more.
""",
    "Write arrays through zarr": """
Ours is on the disk when the commit returns, the official engine's is not. Of 10 KB, Zarr takes
nearly half, see *zarr alone*, and the calls of the system a quarter: opening the folder, creating
and filling a file under a reserved name, and giving it its own while a lock is held. Large arrays
are written from where they are, and the disk begins with them at once; what is left is the
system's copy, the file system, and waiting for the disk. `durability: none` does not wait, [at a
risk](../../docs/how-to/local-disks.md#trading-durability-for-speed).
""",
}
"""By operation; Markdown."""
