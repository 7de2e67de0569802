"""The demonstration from beginning to end."""

from __future__ import annotations

import asyncio
import shlex
import shutil
import sys
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Final

from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.text import Text

from icechunk_async import Repository, RepositoryConfig
from icechunk_async._runtime.dataclasses import dataclass
from icechunk_async.cli.commands.data.contents import show_hierarchy, tree
from icechunk_async.cli.commands.versions.history import diff, show_comparison
from icechunk_async.cli.commands.versions.log import log, show_log
from icechunk_async.cli.demo import changes
from icechunk_async.cli.demo.data import (
    COPIED,
    REFERRED,
    Sources,
    copy_years,
    find_sources,
    refer_to_file,
)
from icechunk_async.cli.demo.drawing import draw
from icechunk_async.cli.demo.place import claim, read_refs
from icechunk_async.engine.commit.conflicts import (
    BasicConflictSolver,
    ConflictDetector,
    VersionSelection,
)
from icechunk_async.errors import ConflictError, RebaseFailedError
from icechunk_async.format.config import LocalFileSystemStore, VirtualChunkContainer

if TYPE_CHECKING:
    from collections.abc import Callable, Generator

    from rich.console import Console

    from icechunk_async import Session, SnapshotId
    from icechunk_async.cli.demo.changes import Correction
    from icechunk_async.cli.demo.place import Place

__all__ = ["CorrectedValue", "Demonstrated", "Narrator", "tell"]


class Narrator:
    """Prints numbered chapters, sentences, documents and a progress bar."""

    def __init__(self, console: Console) -> None:
        """Print to ``console``."""
        self._console = console
        self._chapters = 0

    def chapter(self, title: str) -> None:
        """Begin a chapter."""
        self._chapters += 1
        self._console.print()
        self._console.print(Text(f"{self._chapters}. {title}", "bold cyan"))

    def say(self, sentence: str) -> None:
        """Print a sentence or several."""
        self._console.print(Text(sentence))

    def command(self, line: str) -> None:
        """Print a command on a separate line, never folded, so that it can be copied."""
        self._console.print(Text(f"  {line}", "green"), soft_wrap=True)

    def show[D](self, show: Callable[[D, Console], None], document: D) -> None:
        """Print what a command would print."""
        show(document, self._console)

    @contextmanager
    def progress(self, what: str, total: int) -> Generator[Callable[[int], None]]:
        """Show a bar during the block.

        Yields:
            A function that moves the bar on by some steps.
        """
        columns = (
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
        )
        with Progress(*columns, console=self._console) as bar:
            task = bar.add_task(what, total=total)
            yield lambda steps: bar.advance(task, steps)


_TAG: Final = "v1"


@dataclass(frozen=True, slots=True)
class CorrectedValue:
    """One of the cells that were corrected."""

    at: list[int]
    """Year, latitude and longitude, as indices."""
    unit: str
    before: float
    """At the tag."""
    after: float
    """On the branch."""
    as_of_release: float
    """On the branch at the time of the tagged snapshot."""


@dataclass(frozen=True, slots=True)
class Demonstrated:
    """The document of `demo`."""

    directory: str
    repository: str
    picture: str
    container: str
    branch: str
    tag: str
    release: str
    correction: str
    tip: str
    corrected_value: CorrectedValue
    commands: list[str]
    """Commands to try next."""


async def tell(directory: Path, *, force: bool, console: Console) -> Demonstrated:
    """Run the demonstration in a directory.

    Raises:
        AlreadyExistsError: the directory cannot be used; see `claim`.
        IcechunkError: anything else that went wrong; what was created so far stays.
    """
    story = Narrator(console)
    place = await claim(directory, force=force)
    sources = await asyncio.to_thread(find_sources)
    store = LocalFileSystemStore(str(sources.referred.path.parent))
    container = VirtualChunkContainer(sources.container, store)
    async with Repository.create(
        place.repository,
        config=RepositoryConfig().with_virtual_chunk_container(container),
        authorize_virtual_chunk_access={container.url_prefix: None},
    ) as repository:
        story.chapter("A repository")
        story.say(
            f"Created {place.repository}, in format version {repository.spec_version}. Its "
            f"configuration allows references to files below {container.url_prefix} for those "
            "who open it with that permission."
        )
        await _copy(story, repository, sources)
        await _refer(story, repository, sources)
        release = await _release(story, repository)
        correction = await _correct(story, repository, sources)
        value = await _look_back(story, repository, release, correction)
        await _let_two_write(story, repository, sources)
        await _draw(story, repository, place)
        # Last, with the refs that are left: from here on a change is one by somebody else.
        await asyncio.to_thread(place.mark, await read_refs(repository))
        tip = await repository.lookup_branch("main")
        commands = await _commands(repository, place, sources, release)
    _say_goodbye(story, place, commands)
    return Demonstrated(
        directory=str(place.directory),
        repository=str(place.repository),
        picture=str(place.picture),
        container=container.url_prefix,
        branch="main",
        tag=_TAG,
        release=str(release),
        correction=str(correction.snapshot_id),
        tip=str(tip),
        corrected_value=value,
        commands=commands,
    )


async def _copy(story: Narrator, repository: Repository, sources: Sources) -> None:
    """Copy one scenario."""
    years = sources.years
    story.chapter(f"Copy scenario {COPIED}: {len(years)} yearly means, one commit a decade")
    story.say(
        f"{sources.copied.path.name} holds the mean air temperature of North America in each "
        f"year from {years[0]} to {years[-1]}, as a climate model computed it for medium "
        "emissions."
    )
    with story.progress("years", len(years)) as advance:
        await copy_years(repository, sources.copied, COPIED, years, advance)


async def _refer(story: Narrator, repository: Repository, sources: Sources) -> None:
    """Refer to the other."""
    story.chapter(f"Refer to scenario {REFERRED}: the same for strong mitigation, not copied")
    file = sources.referred
    await refer_to_file(repository, file, REFERRED)
    chunks = sum(int((it.lengths > 0).sum()) for it in file.variables.values())
    story.say(
        f"{chunks} chunks are now references to bytes of {file.path.name}. No data was copied; "
        "should the file be modified, reading is refused."
    )
    story.show(show_hierarchy, await tree(repository, "main"))


async def _release(story: Narrator, repository: Repository) -> SnapshotId:
    """Tag what is there."""
    story.chapter("Tag a release")
    release = await repository.lookup_branch("main")
    await repository.create_tag(_TAG, release)
    story.say(f"Tag {_TAG} names snapshot {release} for good.")
    return release


async def _correct(story: Narrator, repository: Repository, sources: Sources) -> Correction:
    """Change a few values."""
    story.chapter("Correct a few values")
    correction = await changes.correct(repository, COPIED, sources.years)
    story.say(
        f"Suppose a review finds the {correction.cells} cells around Hudson Bay "
        f"{abs(changes.OFFSET_KELVIN):g} K too warm in {changes.CORRECTED_YEAR} (they are not: "
        "this is made up). They are corrected on main; only the one chunk with that year is "
        "written again."
    )
    story.show(show_comparison, await diff(repository, _TAG, "main", max_chunks=3))
    return correction


async def _look_back(
    story: Narrator, repository: Repository, release: SnapshotId, correction: Correction
) -> CorrectedValue:
    """Read the same cell at three places in history."""
    story.chapter("Travel in time")
    moment = (await repository.lookup_snapshot(release)).written_at
    sessions = {
        f"tag {_TAG}": await repository.readonly_session(tag=_TAG),
        "branch main": await repository.readonly_session("main"),
        f"branch main as of {moment:%H:%M:%S.%f} UTC": await repository.readonly_session(
            "main", as_of=moment
        ),
    }
    story.say(f"The middle of the corrected region, {changes.CORRECTED_YEAR}:")
    values: list[float] = []
    for where, session in sessions.items():
        values.append(float(await changes.read(session, correction.path, correction.index)))
        story.say(f"  {values[-1]:.2f} K  {where}")
    story.say("The newest snapshots on main:")
    story.show(show_log, await log(repository, "main", number=5))
    before, after, as_of_release = values
    return CorrectedValue(list(correction.index), "K", before, after, as_of_release)


async def _let_two_write(story: Narrator, repository: Repository, sources: Sources) -> None:
    """Let two sessions commit to main at the same time, twice."""
    story.chapter("Two writers on one branch")
    await changes.make_room_for_means(repository, len(sources.years), [COPIED, REFERRED])
    anna, ben = await _two_sessions(repository)
    await changes.write_means(anna, 0, await changes.area_means(anna, COPIED))
    await changes.write_means(ben, 1, await changes.area_means(ben, REFERRED))
    await anna.commit(f"Yearly means of {COPIED}")
    story.say(
        f"Anna and Ben begin at the same snapshot. Anna writes the yearly means of {COPIED} and "
        f"commits; Ben writes those of {REFERRED}, another chunk of the same array."
    )
    try:
        await ben.commit(f"Yearly means of {REFERRED}")
    except ConflictError as error:
        story.say(f"Ben's commit is refused ({error.kind}): {error}")
    await ben.commit(f"Yearly means of {REFERRED}", rebase_with=ConflictDetector())
    story.say("Ben commits with a rebase: nothing clashes, so both are on main now.")

    anna, ben = await _two_sessions(repository)
    means = await changes.read(anna, changes.MEANS)
    await changes.write_means(anna, 1, means[1].round(1))
    await changes.write_means(ben, 1, means[1].round(2))
    await anna.commit(f"Round the means of {REFERRED} to 0.1 K")
    story.say(f"Then both round the means of {REFERRED}: Anna to 0.1 K, Ben to 0.01 K.")
    message = f"Round the means of {REFERRED} to 0.01 K"
    try:
        await ben.commit(message, rebase_with=ConflictDetector())
    except RebaseFailedError as error:
        story.say(f"Ben's commit is refused ({error.kind}): {error}")
    ours = BasicConflictSolver(on_chunk_conflict=VersionSelection.USE_OURS)
    await ben.commit(message, rebase_with=ours)
    story.say("Ben decides that his own chunks count, and commits with a solver that says so.")


async def _two_sessions(repository: Repository) -> tuple[Session, Session]:
    """Begin two transactions at the same snapshot."""
    return await repository.writable_session("main"), await repository.writable_session("main")


async def _draw(story: Narrator, repository: Repository, place: Place) -> None:
    """Open both scenarios with xarray, and draw them."""
    story.chapter("Open with xarray, and draw")
    release = await repository.readonly_session(tag=_TAG)
    latest = await repository.readonly_session("main")
    # xarray blocks, and Zarr then reads on another event loop, so it gets a thread.
    await asyncio.to_thread(draw, release.store, latest.store, place.picture)
    story.say(f"{place.picture} shows both scenarios, and {changes.CORRECTED_YEAR} at both places.")


async def _commands(
    repository: Repository, place: Place, sources: Sources, release: SnapshotId
) -> list[str]:
    """Return commands to try next."""
    program, where = _program(), shlex.quote(str(place.repository))
    moment = (await repository.lookup_snapshot(release)).written_at.isoformat()
    chunk = f"{REFERRED}/air_temperature/c/0/0/0"
    return [
        f"{program} log {where} -n 8",
        f"{program} tree {where}",
        f"{program} log {where} --as-of {moment} -n 1",
        f"{program} diff {where} {_TAG} main",
        f"{program} show {where} {_TAG} --json",
        f"{program} ls {where} {COPIED}",
        f"{program} cat {where} {COPIED}/air_temperature/zarr.json",
        f"{program} cat {where} {chunk} --authorize {shlex.quote(sources.container)} | wc -c",
    ]


def _program() -> str:
    """Return how this command is called, so that what is printed can be copied."""
    name = "icechunk-async"
    called = Path(sys.argv[0])
    # python -m icechunk_async.cli is called "__main__.py"
    if called.name != name:
        return name  # by another program
    found = shutil.which(name)
    return name if found and called.samefile(found) else shlex.quote(str(called))


def _say_goodbye(story: Narrator, place: Place, commands: list[str]) -> None:
    story.chapter("Where everything is, and what to try next")
    story.say(f"Repository: {place.repository}")
    story.say(f"Picture:    {place.picture}")
    for line in commands:
        story.command(line)
