"""Verify a repository at a level: the order of the steps, and what goes into the report.

The steps are functions of plain values, so that other programs can divide them over machines, as
Spark's job does.
"""

from __future__ import annotations

import zlib
from dataclasses import field, replace
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from icechunk_async._runtime import telemetry
from icechunk_async._runtime.concurrency import bounded_map
from icechunk_async._runtime.dataclasses import dataclass
from icechunk_async._runtime.progress import Progress, no_progress
from icechunk_async.engine.proposals.files import load_all
from icechunk_async.engine.upkeep.integrity.objects import (
    NOT_AUTHORIZED,
    Contents,
    broken_chunks,
    broken_virtual,
)
from icechunk_async.engine.upkeep.integrity.pieces import (
    NO_CODECS,
    NO_SUM,
    NeededObjects,
    Pieces,
    VirtualPieces,
)
from icechunk_async.engine.upkeep.integrity.report import (
    Finding,
    Level,
    NotLookedAt,
    VerifyReport,
    VerifyState,
    beyond,
)
from icechunk_async.engine.upkeep.integrity.structure import (
    Structure,
    examine_manifest,
    stored,
    uncached,
    walk,
)
from icechunk_async.engine.upkeep.survey import Limits, portions
from icechunk_async.errors import FormatError, InvalidInputError, NotFoundError
from icechunk_async.format.ids import SnapshotId
from icechunk_async.format.layout import manifest_key
from icechunk_async.format.manifest.chunk import Kind

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from icechunk_async._runtime.progress import ProgressCallback
    from icechunk_async.engine.files.assets import Assets
    from icechunk_async.engine.history import Audit
    from icechunk_async.engine.open import Engine
    from icechunk_async.engine.upkeep.integrity.objects import ChunkDecoder
    from icechunk_async.engine.upkeep.integrity.pieces import VirtualObject
    from icechunk_async.engine.upkeep.integrity.report import StateFile
    from icechunk_async.engine.upkeep.integrity.structure import ManifestUse
    from icechunk_async.format.manifest.reading import Manifest

    type Place = tuple[int, int]
    """A manifest and a row, as of `Pieces`."""

__all__ = [
    "Checkpoint",
    "Drawn",
    "Looked",
    "Outcome",
    "Prepared",
    "VerifyOptions",
    "draw",
    "examine",
    "located",
    "look",
    "prepare",
    "read",
    "report_of",
    "verify",
]

# Draws are hashes of 64 bits, so a share is a part of their range.
_SHARE_BITS: Final = 64
_MOST_LOCATED: Final = 1000
"""Findings whose array and coordinates are looked up."""
_VIRTUAL_AT_ONCE: Final = 256
"""Virtual objects whose chunks are read before the state is saved."""


@dataclass(frozen=True, slots=True)
class VerifyOptions:
    """The arguments of a verification."""

    level: Level
    refs: tuple[str, ...] | None = None
    """Names of branches, tags, or snapshot ids; None: all branches and tags."""
    ancestry: bool = True
    """Also the snapshots before those that the refs name."""
    sample: float | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        """Raise InvalidInputError for a sample that makes no sense."""
        sample: Any = self.sample
        if sample is None:
            return
        is_share = isinstance(sample, float) and 0 < sample <= 1
        is_number = type(sample) is int and sample >= 1
        if not (is_share or is_number):
            raise InvalidInputError(
                f"The sample is {sample!r}. Give a share of the chunks, a float above 0 and at "
                "most 1, or a number of chunks, an integer of at least 1."
            )

    def plain(self) -> dict[str, Any]:
        """Return plain data to compare with that of another run."""
        refs = None if self.refs is None else list(self.refs)
        return {
            "level": self.level.name.lower(),
            "refs": refs,
            "ancestry": self.ancestry,
            "sample": self.sample,
            "seed": self.seed,
        }


@dataclass(slots=True)
class Prepared:
    """References, snapshots and logs, read and compared."""

    audit: Audit
    refs: dict[str, SnapshotId]
    structure: Structure
    uses: list[ManifestUse]
    findings: list[Finding]
    unread: list[NotLookedAt]


async def prepare(
    engine: Engine,
    options: VerifyOptions,
    progress: ProgressCallback = no_progress,
    tips: Mapping[str, str] | None = None,
) -> Prepared:
    """Read what refs lead to, down to the names of manifests.

    Args:
        engine: the repository.
        options: which refs.
        progress: called with the number of snapshots read.
        tips: where refs led when an earlier run began that is continued; None: as of now.

    Raises:
        NotFoundError: a ref does not exist.
        UnsupportedBySpecError: the layout's files are not known here.
    """
    engine.history.capabilities.require("upkeep")
    audit = await engine.history.audit()
    findings = [
        Finding(it.kind, it.key, it.problem, Level.STRUCTURE.name.lower(), it.detail)
        for it in audit.faults
    ]
    findings += await _proposals(engine, options)
    unread = [NotLookedAt(it) for it in audit.unread]
    if tips is None:
        refs = _chosen(audit, options.refs)
    else:
        # A continued run looks at what the first one looked at: with other tips the order of
        # pieces, and so the place to continue at, would be another.
        refs = {name: SnapshotId.parse(it) for name, it in tips.items()}
        if audit.infos is not None:
            gone = [name for name, it in refs.items() if it not in audit.infos]
            refs = {name: it for name, it in refs.items() if name not in gone}
            if gone:
                unread.append(NotLookedAt("refs whose snapshots were removed meanwhile", len(gone)))
    if not audit.refs and findings:
        unread.append(NotLookedAt("everything but references, which cannot be read"))
    structure = await walk(
        uncached(engine),
        refs.values(),
        audit.infos,
        ancestry=options.ancestry,
        progress=progress,
    )
    hidden = sum(it.kind == "snapshot" and it.problem != "disagrees" for it in structure.findings)
    if audit.infos is None and hidden:
        unread.append(NotLookedAt("snapshots before those that cannot be read"))
    uses = [structure.uses[it] for it in sorted(structure.uses)]
    return Prepared(audit, refs, structure, uses, [*findings, *structure.findings], unread)


async def _proposals(engine: Engine, options: VerifyOptions) -> list[Finding]:
    """Return the newest records of proposals that are damaged; none if only some refs count."""
    known = engine.history.capabilities.proposals and engine.storage.capabilities.listing
    if options.refs is not None or not known:
        return []
    _, faults = await load_all(stored(engine))
    level = Level.STRUCTURE.name.lower()
    return [
        Finding("proposal", key, "unreadable", level, faults[key].message) for key in sorted(faults)
    ]


def _chosen(audit: Audit, names: tuple[str, ...] | None) -> dict[str, SnapshotId]:
    """Return the refs to look at."""
    if names is None:
        return dict(audit.refs)
    # A ref whose file is damaged is reported as damaged, not as one that does not exist.
    broken = {it.key for it in audit.faults}
    chosen: dict[str, SnapshotId] = {}
    for name in names:
        found = [key for key in (f"branch.{name}", f"tag.{name}", name) if key in audit.refs]
        if found:
            chosen[found[0]] = audit.refs[found[0]]
        elif not any(f".{name}/" in key for key in broken):
            chosen[name] = _snapshot_named(audit, name)
    return chosen


def _snapshot_named(audit: Audit, name: str) -> SnapshotId:
    try:
        snapshot_id = SnapshotId.parse(name)
    except InvalidInputError:
        snapshot_id = None
    if snapshot_id is None or (audit.infos is not None and snapshot_id not in audit.infos):
        known = ", ".join(it.partition(".")[2] for it in sorted(audit.refs)[:20]) or "none"
        raise NotFoundError(
            f"There is no branch, tag or snapshot {name!r} to verify. Branches and tags: {known}.",
            ref=name,
        )
    return snapshot_id


async def examine(
    assets: Assets,
    uses: Sequence[tuple[int, ManifestUse]],
    options: VerifyOptions,
    contents: Contents,
    progress: ProgressCallback = no_progress,
) -> tuple[NeededObjects, list[Finding]]:
    """Read manifests, some at a time; decode the chunks inside them if the level asks for it.

    Args:
        assets: where they are.
        uses: manifests with their numbers.
        options: the level, and the sample.
        contents: decodes.
        progress: called with the number of manifests read.
    """
    numbered = {use.id: (number, use) for number, use in uses}
    needed = NeededObjects.joined([])
    findings: list[Finding] = []
    done = 0

    async def one(
        entry: tuple[Any, int],
    ) -> tuple[NeededObjects, list[Finding]]:
        number, use = numbered[entry[0]]
        some, problems, manifest = await examine_manifest(assets, use, number, options.level)
        if manifest is not None and options.level >= Level.DECODE:
            problems += await _inline(manifest, use, options, contents)
        return some, problems

    limits = Limits()
    for portion in portions([(use.id, use.size_bytes) for _, use in uses], limits):
        parts = await bounded_map(one, portion, limit=limits.manifests)
        needed = NeededObjects.joined([needed, *(it for it, _ in parts)])
        findings += [it for _, some in parts for it in some]
        done += len(portion)
        progress(Progress("reading manifests", done, len(uses)))
    return needed, findings


async def _inline(
    manifest: Manifest, use: ManifestUse, options: VerifyOptions, contents: Contents
) -> list[Finding]:
    """Decode the chunks inside a manifest."""
    key = manifest_key(use.id)
    paths = {node_id: path for (node_id, _), path in use.boxes.items()}
    findings: list[Finding] = []
    for node_id, refs in manifest.arrays.items():
        codecs = use.codecs.get(node_id, NO_CODECS)
        rows = np.flatnonzero(refs.kinds == Kind.INLINE)
        if codecs == NO_CODECS or not len(rows):
            continue
        if options.sample is not None:
            # Drawn by what the chunk is, not by its turn: two runs with one seed look at the same
            # ones.
            names = [b"%b %d %d" % (use.id, row, options.seed) for row in rows.tolist()]
            # A CRC has 32 bits; shifted, it spreads over the range of which a share is taken.
            hashes = np.array([zlib.crc32(it) << 32 for it in names], np.uint64)
            drawn = rows[_lowest(hashes, options.sample)]
            contents.not_drawn += len(rows) - len(drawn)
            rows = drawn
        for row in rows.tolist():
            start = int(refs.offsets[row])
            data = refs.inline[start : start + int(refs.lengths[row])]
            contents.chunks_read += 1
            contents.bytes_read += len(data)
            problem = await contents.decode(codecs, data)
            if problem is not None:
                at: tuple[int, ...] = tuple(refs.coords[row].tolist())
                found = Finding("manifest", key, "undecodable", "decode", problem, 1)
                findings.append(replace(found, array=paths.get(node_id), coordinates=at))
    return findings


@dataclass(slots=True)
class Drawn:
    """The pieces to look at, of all that are needed."""

    native: Pieces
    virtual: VirtualPieces
    chunks: int
    """Of the repository, drawn or not."""
    chunk_objects: int
    virtual_objects: int
    unread: list[NotLookedAt]


def draw(needed: NeededObjects, options: VerifyOptions) -> Drawn:
    """Draw a sample, or take all."""
    native, virtual = needed.native, needed.virtual
    if options.level < Level.SUMS:
        native = native.objects()
    objects = int(native.new_objects().sum()) if len(native) else 0
    drawn = Drawn(native, virtual, len(native), objects, len(virtual.found), [])
    if options.level < Level.SUMS:
        drawn.chunks = 0
    if options.sample is None:
        return drawn
    draws = native.draws(options.seed)
    drawn.native = native.take(_lowest(draws, options.sample))
    names = sorted(virtual.found, key=lambda it: (it[0], it[1] or "", it[2]))
    hashes = [zlib.crc32(f"{name} {options.seed}".encode()) << 32 for name in names]
    chosen = _lowest(np.array(hashes, np.uint64), options.sample).tolist()
    drawn.virtual = VirtualPieces({names[it]: virtual.found[names[it]] for it in chosen})
    skipped = len(native) - len(drawn.native)
    what = "chunk objects" if options.level < Level.SUMS else "chunks"
    drawn.unread.append(NotLookedAt(f"{what} that were not drawn for the sample", skipped))
    left = len(names) - len(chosen)
    if left:
        drawn.unread.append(NotLookedAt("virtual objects that were not drawn", left))
    return drawn


def _lowest(draws: Any, sample: float) -> Any:
    """Return the rows of a sample, ascending."""
    if isinstance(sample, float):
        # 1.0 times 2^64 has no place in 64 bits.
        if sample >= 1:
            return np.arange(len(draws))
        return np.flatnonzero(draws < np.uint64(int(sample * 2.0**_SHARE_BITS)))
    if sample >= len(draws):
        return np.arange(len(draws))
    # The lowest draws, without sorting all: of a billion pieces a few thousand are wanted.
    return np.sort(np.argpartition(draws, sample - 1)[:sample])


@dataclass(slots=True)
class Checkpoint:
    """Where to report to after each portion of chunks."""

    progress: ProgressCallback = no_progress
    state: VerifyState | None = None
    """Where an earlier run ended, and then this one."""
    file: StateFile | None = None

    async def save(self, contents: Contents, found: Looked) -> None:
        """Keep the state."""
        if self.file is None or self.state is None:
            return
        # Findings of chunks that were read. Those of objects are found again by the next run, which
        # looks anew.
        mine = [it for _, it in found.findings if it.offset is not None]
        now = replace(
            self.state,
            chunks_read=contents.chunks_read,
            bytes_read=contents.bytes_read,
            without_sum=contents.without_sum,
            undecided=contents.undecided,
            unread=contents.unread,
            findings=[*self.state.findings, *mine],
        )
        await self.file.save(now)


@dataclass(slots=True)
class Looked:
    """Findings about objects and their contents."""

    findings: list[tuple[Place | None, Finding]] = field(
        default_factory=list[tuple["Place | None", Finding]]
    )
    broken: set[str] = field(default_factory=set[str])
    """Keys of chunk objects that need not be read."""
    closed: set[VirtualObject] = field(default_factory=set["VirtualObject"])
    """Virtual objects that need not or cannot be read."""
    unauthorized: int = 0
    unreachable: int = 0
    """Virtual objects whose store did not reply."""


async def look(
    drawn: Drawn,
    options: VerifyOptions,
    contents: Contents,
    *,
    prefix: str = "chunks/",
    progress: ProgressCallback = no_progress,
) -> Looked:
    """Look for objects; nothing is read.

    Args:
        drawn: which ones.
        options: the level.
        contents: where they are.
        prefix: of all keys of chunk objects.
        progress: told what is done.
    """
    found = Looked()
    if options.level < Level.EXISTENCE:
        return found
    objects = drawn.native.objects()
    progress(Progress("looking for chunk objects", 0, len(objects)))
    out_of = drawn.chunk_objects if options.sample is not None else None
    broken = await broken_chunks(
        contents.storage, objects, options.level, prefix=prefix, out_of=out_of
    )
    found.findings += [(_place(objects, row), it) for row, it in broken]
    found.broken = {it.location for _, it in broken if it.problem == "missing"}
    virtual = drawn.virtual.objects()
    progress(Progress("looking at virtual objects", 0, len(virtual)))
    outside, unread = await broken_virtual(contents.virtual, virtual, options.level)
    found.findings += [(_virtual_place(drawn.virtual, it), problem) for it, problem in outside]
    found.closed = {*unread, *(it for it, _ in outside)}
    found.unauthorized = sum(why == NOT_AUTHORIZED for why in unread.values())
    found.unreachable = len(unread) - found.unauthorized
    return found


async def read(
    drawn: Drawn, found: Looked, contents: Contents, checkpoint: Checkpoint | None = None
) -> None:
    """Read the chunks that were drawn, if the level asks for it, and add to what was found."""
    point = checkpoint or Checkpoint()
    if contents.level < Level.SUMS:
        return
    native = drawn.native
    if found.broken:
        native = native.take(_without(native, found.broken))
    await _read_native(native, contents, found, point)
    if contents.level >= Level.DECODE:
        left = {it: some for it, some in drawn.virtual.found.items() if it not in found.closed}
        await _read_virtual(VirtualPieces(left), contents, found, point)


def _place(pieces: Pieces, row: int) -> Place:
    return int(pieces.manifests[row]), int(pieces.rows[row])


def _virtual_place(virtual: VirtualPieces, it: VirtualObject, offset: int | None = None) -> Place:
    for (start, _, _), (_, manifest, row) in virtual.found[it].items():
        if offset is None or start == offset:
            return manifest, row
    raise AssertionError("a virtual chunk was found that nobody asked for")


def _without(native: Pieces, keys: set[str]) -> Any:
    """Return the rows of pieces whose objects are not among some."""
    first = native.new_objects()
    number_of = np.cumsum(first) - 1
    # By object, of which there are far fewer than pieces.
    keep = np.array([native.key(row) not in keys for row in np.flatnonzero(first).tolist()])
    return np.flatnonzero(keep[number_of])


async def _read_native(
    pieces: Pieces,
    contents: Contents,
    found: Looked,
    point: Checkpoint,
) -> None:
    total, state = len(pieces), point.state
    if contents.level < Level.DECODE:  # without a checksum there is nothing to compare with
        summed = pieces.sums != NO_SUM
        contents.without_sum += int((~summed).sum())
        pieces = pieces.take(np.flatnonzero(summed))
        total = len(pieces)
    if state is not None and state.chunk is not None:
        pieces = pieces.after(state.chunk)
    for start, stop in contents.portions(pieces):
        part = pieces.take(np.arange(start, stop))
        problems = await contents.native(part)
        found.findings += [(_place(part, row), it) for row, it in problems]
        point.progress(Progress("reading chunks", total - len(pieces) + stop, total))
        if state is not None:
            state.chunk = part.cursor(len(part) - 1)
            await point.save(contents, found)


async def _read_virtual(
    needed: VirtualPieces,
    contents: Contents,
    found: Looked,
    point: Checkpoint,
) -> None:
    state = point.state
    order = sorted(needed.found, key=lambda it: (it[0], it[1] or "", it[2]))
    if state is not None and state.virtual is not None:
        order = [it for it in order if it[0] > state.virtual]
    start = 0
    while start < len(order):
        stop = min(start + _VIRTUAL_AT_ONCE, len(order))
        while stop < len(order) and order[stop][0] == order[stop - 1][0]:
            stop += 1  # the state names locations, so those of one location stay together
        part = VirtualPieces({it: needed.found[it] for it in order[start:stop]})
        for it, offset, problem in await contents.outside(part):
            found.findings.append((_virtual_place(part, it, offset), problem))
        point.progress(Progress("reading virtual chunks", stop, len(order)))
        if state is not None:
            state.virtual = order[stop - 1][0]
            await point.save(contents, found)
        start = stop


async def verify(
    engine: Engine,
    options: VerifyOptions,
    decoder: ChunkDecoder | None = None,
    *,
    file: StateFile | None = None,
    progress: ProgressCallback | None = None,
) -> VerifyReport:
    """Verify a repository; see `Repository.verify`.

    Args:
        engine: the repository.
        options: what to look at.
        decoder: needed at the level *decode*.
        file: keeps the state of a run that may be interrupted.
        progress: called with each step.
    """
    progress = progress or no_progress
    with telemetry.span("verify", level=options.level.name.lower()):
        state = None if file is None else await file.load()
        # What was read with other options would count as looked at with these.
        if state is not None and state.options != options.plain():
            raise InvalidInputError(
                f"The interrupted verification was of {state.options}, and this one is of "
                f"{options.plain()}. Give the same options, or another file."
            )
        begun = await prepare(engine, options, progress, None if state is None else state.refs)
        if file is not None and state is None:
            state = VerifyState(options.plain(), {key: str(it) for key, it in begun.refs.items()})
            # Before anything is read, so that the tips of this moment are known to a run that
            # continues.
            await file.save(state)
        assets = uncached(engine)
        contents = Contents(
            assets.storage, engine.virtual, options.level, begun.structure.codecs, decoder
        )
        numbered = list(enumerate(begun.uses))
        # Manifests are read anew also by a run that continues: that is little beside the chunks,
        # and what they need may not be kept in a small file.
        needed, problems = await examine(assets, numbered, options, contents, progress)
        if state is not None and (state.chunk is not None or state.virtual is not None):
            _continue(contents, state)
        drawn = draw(needed, options)
        looked = await look(drawn, options, contents, progress=progress)
        await read(drawn, looked, contents, Checkpoint(progress, state, file))
        found = await located(assets, begun.uses, looked.findings)
        if state is not None:
            found = [*found, *(it for it in state.findings if it not in found)]
        findings = [*begun.findings, *problems, *found]
        # A long run and a collection may overlap: what was expired meanwhile is not damage.
        findings = await _still_there(engine, options, begun, findings)
        report = report_of(engine, options, begun, Outcome(drawn, looked, contents), findings)
    if file is not None:
        await file.remove()
    return report


def _continue(contents: Contents, state: VerifyState) -> None:
    """Count what an earlier run read, chunks inside manifests included."""
    contents.chunks_read, contents.bytes_read = state.chunks_read, state.bytes_read
    contents.undecided, contents.unread = dict(state.undecided), dict(state.unread)
    if contents.level >= Level.DECODE:  # below, the sums decide before anything is read
        contents.without_sum = state.without_sum


@dataclass(frozen=True, slots=True)
class Outcome:
    """All that a report needs besides findings."""

    drawn: Drawn
    looked: Looked
    contents: Contents


def report_of(
    engine: Engine,
    options: VerifyOptions,
    begun: Prepared,
    outcome: Outcome,
    findings: Iterable[Finding],
) -> VerifyReport:
    """Put a report together."""
    drawn, looked, contents = outcome.drawn, outcome.looked, outcome.contents
    unread = [*begun.unread, *drawn.unread, *beyond(options.level)]
    if contents.not_drawn:
        unread.append(
            NotLookedAt("chunks inside manifests that were not drawn", contents.not_drawn)
        )
    if looked.unauthorized:
        what = "virtual objects in containers that were not authorised"
        unread.append(NotLookedAt(what, looked.unauthorized))
    if looked.unreachable:
        unread.append(NotLookedAt("virtual objects whose store failed", looked.unreachable))
    for why, count in sorted(contents.unread.items()):
        unread.append(NotLookedAt(f"virtual chunks that could not be read: {why}", count))
    for why, count in sorted(contents.undecided.items()):
        unread.append(NotLookedAt(f"whether chunks can be decoded: {why}", count))
    if options.level >= Level.SUMS and contents.without_sum:
        what = "checksums of chunks that have none stored"
        unread.append(NotLookedAt(what, contents.without_sum))
    return VerifyReport(
        engine.storage.description.url,
        engine.history.spec_version,
        options.level.name.lower(),
        options.sample,
        options.seed,
        tuple(sorted(begun.refs)),
        begun.structure.snapshots,
        begun.structure.logs,
        len(begun.uses),
        drawn.chunks,
        drawn.chunk_objects,
        drawn.virtual_objects,
        looked.unauthorized,
        contents.chunks_read,
        contents.bytes_read,
        tuple(findings),
        tuple(unread),
    )


async def located(
    assets: Assets, uses: Sequence[ManifestUse], found: Sequence[tuple[Place | None, Finding]]
) -> list[Finding]:
    """Say of findings which array and chunk is concerned."""
    wanted = sorted({place[0] for place, _ in found[:_MOST_LOCATED] if place is not None})
    arrays: dict[Place, tuple[str | None, tuple[int, ...]]] = {}
    for number in wanted:
        use = uses[number]
        try:
            manifest = await assets.manifests.read(use.id)
        except FormatError:
            continue
        paths = {node_id: path for (node_id, _), path in use.boxes.items()}
        rows = {place[1] for place, _ in found if place is not None and place[0] == number}
        first = 0
        strays = [(node_id, refs) for (node_id, _), refs in manifest.strays.items()]
        for node_id, refs in [*manifest.arrays.items(), *strays]:
            for row in rows:
                if first <= row < first + len(refs):
                    at: tuple[int, ...] = tuple(refs.coords[row - first].tolist())
                    arrays[number, row] = paths.get(node_id), at
            first += len(refs)
    result: list[Finding] = []
    for place, it in found:
        known = None if place is None else arrays.get(place)
        if known is not None:
            it = replace(it, array=known[0], coordinates=known[1])  # noqa: PLW2901
        result.append(it)
    return result


async def _still_there(
    engine: Engine, options: VerifyOptions, begun: Prepared, findings: list[Finding]
) -> list[Finding]:
    """Leave out what is missing because it was expired and collected since the run began."""
    if not any(it.problem == "missing" and it.kind != "virtual" for it in findings):
        return findings
    audit, before = await engine.history.audit(), begun.audit
    if audit.infos is not None and before.infos is not None:
        same = audit.refs == before.refs and audit.infos.keys() >= before.infos.keys()
        if same:
            return findings
    assets = uncached(engine)
    now = await walk(
        assets, audit.refs.values(), audit.infos, ancestry=options.ancestry, progress=no_progress
    )
    uses = [now.uses[it] for it in sorted(now.uses)]
    contents = Contents(assets.storage, engine.virtual, Level.EXISTENCE, now.codecs)
    level = replace(options, level=Level.EXISTENCE)
    needed, _ = await examine(assets, list(enumerate(uses)), level, contents)
    native = needed.native.objects()
    keys = {native.key(row) for row in range(len(native))} | {manifest_key(it.id) for it in uses}
    keys |= {it.location for it in now.findings}
    return [it for it in findings if it.problem != "missing" or it.location in keys]
