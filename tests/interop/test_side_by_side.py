"""Both engines do the same at random, step by step, and answer the same after each."""

from __future__ import annotations

import datetime as dt
import os
import pickle
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule

from tests.interop.facade_pair import PACKAGES
from tests.interop.side_differences import difference
from tests.interop.side_edits import BASE, EDITS, FORK_EDITS, PATHS, RANKS, Edit, edit
from tests.interop.side_views import check_views
from tests.interop.sides import Side, attempt
from tests.interop.theirs import icechunk

if TYPE_CHECKING:
    from collections.abc import Callable

EXAMPLES = int(os.environ.get("SIDE_BY_SIDE_EXAMPLES", "5"))
STEPS = int(os.environ.get("SIDE_BY_SIDE_STEPS", "25"))

SLOTS = st.integers(0, 2)
BRANCHES = st.sampled_from(["main", "main", "main", "dev", "dev", "x"])
TAGS = st.sampled_from(["v1", "v2", "v3"])
SNAPSHOTS = st.integers(0, 30)
METADATA = st.sampled_from([None, {}, {"a": 1}, {"b": [1.5, None, {"c": True}], "d": "é"}])
CONFIGS = st.tuples(
    st.sampled_from([0, 8, 8, 512]),
    st.sampled_from([None, None, 1, 2]),
    st.sampled_from([None, 1, 3]),
)
REARRANGE = int(icechunk.SessionMode.rearrange)
WRITABLE = int(icechunk.SessionMode.writable)
_PUBLISHING = {"commit", "amend", "rewrite", "closed: commit"}
"""Steps that leave other files behind on each side when they are refused late."""
SOLVERS = ("detector", "ours", "theirs", "fail", "strict")


def solver(package: Any, name: str | None) -> Any:
    """Return a conflict solver of the package."""
    if name is None:
        return None
    if name == "detector":
        return package.ConflictDetector()
    choice = {"ours": "UseOurs", "theirs": "UseTheirs"}.get(name, "Fail")
    return package.BasicConflictSolver(
        on_chunk_conflict=getattr(package.VersionSelection, choice),
        fail_on_delete_of_updated_array=name == "strict",
        fail_on_delete_of_updated_group=name == "strict",
    )


class SideBySide(RuleBasedStateMachine):
    """The operations of both packages, each engine on a separate repository."""

    together = False
    """Whether both work on one repository, in turns."""
    places: Path
    """Where repositories may be made."""

    def __init__(self) -> None:
        """Make an empty place for each side."""
        super().__init__()
        self.base = Path(tempfile.mkdtemp(dir=self.places))
        source = self.base / "source"
        (source / "sub").mkdir(parents=True)
        (source / "data").write_bytes(bytes(range(100)))
        (source / "sub/more").write_bytes(bytes(range(50, 150)))
        names = ("both", "both") if self.together else ("theirs", "ours")
        self.sides = [
            Side(package, self.base / name, source)
            for package, name in zip(PACKAGES, names, strict=True)
        ]
        if self.together:
            self.sides[1].names = self.sides[0].names
        self.turn = 0
        self.steps = 0
        self.expired = 0
        self.leftovers = False

    @initialize(spec=st.sampled_from([1, 2, 2]), config=CONFIGS, empty=st.booleans())
    def begin(self, spec: int, config: tuple[int, int | None, int | None], *, empty: bool) -> None:
        """Create the repository on each side; once if they share it."""
        self.spec = spec
        for side in self.sides[: 1 if self.together else 2]:
            side.create(spec, config)
        if self.together:
            self.sides[1].open()
        if not empty:
            self._edit(0, list(BASE))
            self._ask("commit", lambda side: side.sessions[0].commit("base"), 0)
            self._close(0)
        self._check()

    def _actors(self) -> list[Side]:
        if not self.together:
            return self.sides
        self.turn += 1
        return [self.sides[self.turn // 2 % 2]]

    def _ask(self, step: str, do: Callable[[Side], object], slot: int | None = None) -> bool:
        """Do something on each side that takes part, and compare; answer whether it was done."""
        actors = self._actors() if slot is None else self._with(slot)
        outcomes = [attempt(side, do) for side in actors]
        if len(outcomes) == 2 and outcomes[0] != outcomes[1]:
            session = None if slot is None else actors[0].sessions.get(slot)
            idle = session is not None and int(session.mode) != WRITABLE
            known = difference(step, *outcomes, idle=idle)
            assert known is not None, f"{step}: theirs {outcomes[0]}, ours {outcomes[1]}"
            if known.ends and slot is not None:
                self._close(slot)
        if outcomes[0][0] == "refused" and step in _PUBLISHING:
            self.leftovers = True
        return outcomes[0][0] == "did"

    def _with(self, slot: int) -> list[Side]:
        """Return the sides that have a session in the slot; begin one on main if none has."""
        found = [side for side in self.sides if slot in side.sessions]
        if not found:
            found = self._actors()
            for side in found:
                side.sessions[slot] = side.repo.writable_session("main")
        return found

    def _edit(self, slot: int, edits: list[Edit]) -> None:
        for it in edits:

            def do(side: Side, it: Edit = it) -> object:
                return edit(side, side.sessions[slot], it)

            self._ask(it.kind, do, slot)

    def _close(self, slot: int) -> None:
        for side in self.sides:
            side.sessions.pop(slot, None)

    def _close_all(self) -> None:
        for side in self.sides:
            side.sessions.clear()

    def _astray(self, slot: int) -> bool:
        """Return whether the base of a session is no longer on its branch."""
        side = self._with(slot)[0]
        session = side.sessions[slot]
        if session.branch not in side.repo.list_branches():
            return False
        line = side.repo.ancestry(branch=session.branch)
        return session.snapshot_id not in [it.id for it in line]

    def _behind(self, slot: int) -> bool:
        """Return whether the branch of a session moved on since the session read it."""
        side = self._with(slot)[0]
        session = side.sessions[slot]
        if session.branch not in side.repo.list_branches():
            return False
        return bool(side.repo.lookup_branch(session.branch) != session.snapshot_id)

    def _check(self, *, slot: int | None = None, everything: bool = False) -> None:
        self.steps += 1
        for side in self.sides:
            side.age(self.steps)
        check_views(
            self.sides,
            self.spec,
            slot=slot,
            everything=everything,
            left_out=self._uncounted(),
        )

    def _uncounted(self) -> set[str]:
        """Return which counts of garbage differ on purpose."""
        found: set[str] = set()
        if not self.together:  # each compresses metadata its own way
            found.add("bytes")
        if self.expired > 1:  # their dry run leaves out logs that the real run deletes
            found |= {"bytes", "transaction_logs"}
        if self.leftovers and not self.together:  # of forks, and of what was refused late
            found |= {"bytes", "transaction_logs", "snapshots", "manifests"}
        return found

    # sessions

    @rule(slot=SLOTS, branch=BRANCHES, rearrange=st.sampled_from([False, False, True]))
    def session(self, slot: int, branch: str, *, rearrange: bool) -> None:
        """Begin a session in place of another."""
        self._close(slot)

        def do(side: Side) -> object:
            repo = side.repo
            make = repo.rearrange_session if rearrange else repo.writable_session
            side.sessions[slot] = make(branch)
            return side.sessions[slot].snapshot_id

        self._ask("session", do)
        self._check()

    @rule(slot=SLOTS, edits=EDITS)
    def edit(self, slot: int, edits: list[Edit]) -> None:
        """Change a session."""
        self._edit(slot, edits)
        self._check(slot=slot)

    @rule(
        slot=SLOTS, edits=EDITS, message=st.sampled_from(["", "m", "多 words"]), metadata=METADATA
    )
    def edit_and_commit(
        self, slot: int, edits: list[Edit], message: str, metadata: dict[str, Any] | None
    ) -> None:
        """Change a session and commit, without looking at other branches."""
        self._edit(slot, edits)
        self._ask("commit", lambda side: side.sessions[slot].commit(message, metadata), slot)
        self._check(slot=slot)

    @rule(
        slot=SLOTS,
        metadata=METADATA,
        rebase=st.sampled_from([None, *SOLVERS]),
        empty=st.booleans(),
        tries=st.sampled_from([1000, 1000, 0]),
    )
    def commit(
        self,
        slot: int,
        metadata: dict[str, Any] | None,
        rebase: str | None,
        tries: int,
        *,
        empty: bool,
    ) -> None:
        """Commit, perhaps over what others committed."""
        if self._astray(slot):  # the official engine continues from the branch's current tip
            rebase = None
        behind = rebase is not None and self._behind(slot)
        self._ask(
            "commit",
            lambda side: side.sessions[slot].commit(
                "commit",
                metadata,
                rebase_with=solver(side.package, rebase),
                rebase_tries=tries,
                allow_empty=empty,
            ),
            slot,
        )
        if behind:  # the try that lost may have stored a snapshot, on either side or on both
            self.leftovers = True
        self._check(slot=slot)

    @rule(slot=SLOTS, metadata=METADATA, empty=st.booleans())
    def amend(self, slot: int, metadata: dict[str, Any] | None, *, empty: bool) -> None:
        """Replace the tip."""
        self._ask(
            "amend",
            lambda side: side.sessions[slot].amend("amended", metadata=metadata, allow_empty=empty),
            slot,
        )
        self._check(slot=slot)

    @rule(slot=SLOTS, metadata=METADATA)
    def flush(self, slot: int, metadata: dict[str, Any] | None) -> None:
        """Make a snapshot of no branch; the official engine also makes one of an ended session."""
        if self._with(slot)[0].sessions[slot].read_only:
            return
        self._ask(
            "flush", lambda side: side.sessions[slot].flush("flushed", metadata=metadata), slot
        )
        self._check(slot=slot)

    @rule(slot=SLOTS)
    def discard(self, slot: int) -> None:
        """Forget changes."""
        self._ask("discard", lambda side: side.sessions[slot].discard_changes(), slot)
        self._check(slot=slot)

    @rule(slot=SLOTS, name=st.sampled_from(SOLVERS))
    def rebase(self, slot: int, name: str) -> None:
        """Rebase by hand."""

        def do(side: Side) -> object:
            try:
                return side.sessions[slot].rebase(solver(side.package, name))
            except side.package.RebaseFailedError as error:
                found: list[list[Any]] = [
                    [
                        int(it.conflict_type),
                        it.path,
                        sorted(list(at) for at in it.conflicted_chunks or ()),
                    ]
                    for it in error.conflicts
                ]
                return [side.plain(error.snapshot), *sorted(found)]

        self._ask("rebase", do, slot)
        self._check(slot=slot)

    @rule(
        slot=SLOTS,
        works=st.lists(FORK_EDITS, min_size=1, max_size=3),
        travel=st.booleans(),
        nested=st.booleans(),
    )
    def fork(self, slot: int, works: list[list[Edit]], *, travel: bool, nested: bool) -> None:
        """Fork, change the forks, and merge them; not of a session that moves, or has moved."""
        if int(self._with(slot)[0].sessions[slot].mode) == REARRANGE:
            return
        forks: dict[int, list[Any]] = {id(side): [] for side in self.sides}
        touched = _touched(self._with(slot)[0].sessions[slot].status())
        self.leftovers = True

        def make(side: Side) -> None:
            made = side.sessions[slot].fork()
            forks[id(side)].append(pickle.loads(pickle.dumps(made)) if travel else made)

        def merge(side: Side) -> None:
            mine = forks[id(side)]
            if nested and len(mine) > 1:
                mine[0].merge(*mine[1:])
                mine = mine[:1]
            side.sessions[slot].merge(*mine)

        for work in works:
            if not self._ask("fork", make, slot):
                return
            # Near what the session changed the official engine fails, or forgets.
            for it in [it for it in work if not _near(it.path, touched)]:

                def do(side: Side, it: Edit = it) -> object:
                    return edit(side, forks[id(side)][-1], it)

                self._ask(it.kind, do, slot)
        if not self._ask("merge", merge, slot):
            self._close(slot)
        self._check(slot=slot)

    @rule(slot=SLOTS, path=st.sampled_from(PATHS), at=st.tuples(*[st.integers(0, 4)] * 2))
    def look(self, slot: int, path: str, at: tuple[int, int]) -> None:
        """Ask a session about a node and a chunk."""
        coords = at[: RANKS.get(path, 1)]
        self._ask("chunk type", lambda it: it.sessions[slot].chunk_type(f"/{path}", coords), slot)
        self._ask("node id", lambda it: len(it.sessions[slot].get_node_id(f"/{path}")), slot)
        self._ask(
            "virtual locations",
            lambda it: sorted(it.sessions[slot].all_virtual_chunk_locations()),
            slot,
        )

    # branches and tags

    @rule(name=BRANCHES, snapshot=SNAPSHOTS)
    def create_branch(self, name: str, snapshot: int) -> None:
        """Create a branch at any snapshot."""
        self._ask("create branch", lambda it: it.repo.create_branch(name, _at(it, snapshot)))
        self._check()

    @rule(name=BRANCHES, snapshot=SNAPSHOTS, expected=st.none() | SNAPSHOTS)
    def reset_branch(self, name: str, snapshot: int, expected: int | None) -> None:
        """Set a branch to any snapshot, perhaps only from where it is expected."""
        self._ask(
            "reset branch",
            lambda it: it.repo.reset_branch(
                name,
                _at(it, snapshot),
                from_snapshot_id=None if expected is None else _at(it, expected),
            ),
        )
        self._check()

    @rule(name=BRANCHES)
    def delete_branch(self, name: str) -> None:
        """Delete a branch."""
        self._ask("delete branch", lambda side: side.repo.delete_branch(name))
        self._check()

    @rule(name=TAGS, snapshot=SNAPSHOTS)
    def create_tag(self, name: str, snapshot: int) -> None:
        """Create a tag."""
        self._ask("create tag", lambda side: side.repo.create_tag(name, _at(side, snapshot)))
        self._check()

    @rule(name=TAGS)
    def delete_tag(self, name: str) -> None:
        """Delete a tag, whose name is gone for ever."""
        self._ask("delete tag", lambda side: side.repo.delete_tag(name))
        self._check()

    @rule(first=SNAPSHOTS, last=SNAPSHOTS)
    def diff(self, first: int, last: int) -> None:
        """Compare any two snapshots."""
        self._ask(
            "diff",
            lambda side: side.repo.diff(
                from_snapshot_id=_at(side, first), to_snapshot_id=_at(side, last)
            ),
        )

    # upkeep

    @rule(snapshot=SNAPSHOTS, later=st.integers(0, 1), branches=st.booleans(), tags=st.booleans())
    def expire(self, snapshot: int, later: int, *, branches: bool, tags: bool) -> None:
        """Expire what is older than some snapshot."""

        def do(side: Side) -> object:
            info = side.repo.lookup_snapshot(_at(side, snapshot))
            moment = info.written_at + dt.timedelta(microseconds=later)
            return side.repo.expire_snapshots(
                moment, delete_expired_branches=branches, delete_expired_tags=tags
            )

        if self._ask("expire", do):
            self.expired += 1
        self._check(everything=True)

    @rule(back=st.integers(0, 10), dry=st.booleans())
    def collect(self, back: int, *, dry: bool) -> None:
        """Collect garbage older than ``back`` steps. Sessions end before it is deleted."""
        if not dry:
            self._close_all()
        step = self.steps + 2 - back

        def do(side: Side) -> object:
            found = side.plain(side.repo.garbage_collect(side.moment(step), dry_run=dry))
            return {it: count for it, count in found.items() if it not in uncounted}

        uncounted = self._uncounted()
        if self._ask("collect", do) and not dry and back == 0:
            self.leftovers = False
        for side in self.sides:
            side.contents.clear()
        self._check(everything=not dry)

    @rule(branch=BRANCHES, method=st.sampled_from(["new_commit", "amend"]), metadata=METADATA)
    def rewrite(self, branch: str, method: str, metadata: dict[str, Any] | None) -> None:
        """Write manifests again."""
        self._ask(
            "rewrite",
            lambda side: side.repo.rewrite_manifests(
                "rewritten", branch=branch, metadata=metadata, commit_method=method
            ),
        )
        self._check()

    # the repository itself

    @rule(given=st.sampled_from([{}, {"a": 1}, {"b": {"c": [None, 2.5]}}]), update=st.booleans())
    def set_metadata(self, given: dict[str, Any], *, update: bool) -> None:
        """Set or update metadata."""
        self._ask(
            "metadata",
            lambda side: (side.repo.update_metadata if update else side.repo.set_metadata)(given),
        )
        self._check()

    @rule(
        slot=SLOTS,
        reason=st.sampled_from([None, "maintenance"]),
        edits=EDITS,
        snapshot=SNAPSHOTS,
    )
    def read_only(self, slot: int, reason: str | None, edits: list[Edit], snapshot: int) -> None:
        """Close the repository, try to change it, and open it again."""
        self._edit(slot, edits)

        def to(name: str, why: str | None) -> Callable[[Side], object]:
            def do(side: Side) -> object:
                availability = getattr(side.package.RepoAvailability, name)
                return side.repo.set_status(side.package.RepoStatus(availability, None, why))

            return do

        if not self._ask("status", to("read_only", reason)):
            return
        self._check()
        now = dt.datetime.now(dt.UTC)
        self._ask("closed: session", lambda side: side.repo.writable_session("main").branch)
        if any(slot in side.sessions for side in self.sides):
            self._ask("closed: commit", lambda side: side.sessions[slot].commit("no"), slot)
        self._ask("closed: tag", lambda side: side.repo.create_tag("v1", _at(side, snapshot)))
        self._ask("closed: branch", lambda it: it.repo.create_branch("dev", _at(it, snapshot)))
        self._ask("closed: delete", lambda side: side.repo.delete_branch("dev"))
        self._ask("closed: metadata", lambda side: side.repo.set_metadata({"closed": True}))
        self._ask("closed: expire", lambda side: side.repo.expire_snapshots(now))
        self._ask("closed: collect", lambda side: side.repo.garbage_collect(side.moment(0)))
        self._ask("closed: config", lambda side: side.repo.save_config())
        self._ask("status", to("online", None))
        self._check(slot=slot)

    @rule(
        name=st.sampled_from(["create_tag", "delete_tag", "move_node", "nonsense"]),
        setting=st.sampled_from([True, False, None]),
    )
    def set_flag(self, name: str, *, setting: bool | None) -> None:
        """Switch a feature."""
        self._ask("flag", lambda side: side.repo.set_feature_flag(name, setting))
        self._check()

    @rule(config=CONFIGS, save=st.booleans())
    def configure(self, config: tuple[int, int | None, int | None], *, save: bool) -> None:
        """Go on with another configuration, perhaps for all to come."""

        def do(side: Side) -> None:
            side.repo = side.repo.reopen(side.config(*config), side.access())
            if save:
                side.repo.save_config()

        self._ask("configure", do)
        self._check()

    @rule()
    def reopen(self) -> None:
        """Open the repository anew. Sessions stay open."""
        self._ask("reopen", Side.open)
        self._check()

    @rule(wanted=st.integers(0, 3))
    def migrate(self, wanted: int) -> None:
        """Bring a repository of version 1 to version 2, at some moment."""
        if self.spec > 1 or wanted:
            return
        self._close_all()
        self._ask(
            "migrate",
            lambda side: (
                side.package.upgrade_icechunk_repository(side.repo, dry_run=False).spec_version
            ),
        )
        for side in self.sides:
            side.open()
        self.spec = 2
        self._check(everything=True)


def _at(side: Side, number: int) -> str:
    known = side.known
    return known[number % len(known)]


def _touched(status: Any) -> set[str]:
    """Return the paths that a session changed."""
    found = set(status.updated_chunks)
    for kind in ("groups", "arrays"):
        for verb in ("new", "updated", "deleted"):
            found |= getattr(status, f"{verb}_{kind}")
    return {path.strip("/") for path in found}


def _near(path: str, touched: set[str]) -> bool:
    """Return whether a path, something above it or below it was changed."""
    return any(
        it in {path, ""} or path == "" or it.startswith(f"{path}/") or path.startswith(f"{it}/")
        for it in touched
    )


class InTurns(SideBySide):
    """Both engines on one repository, now the one and now the other."""

    together = True


_RUN = settings(
    max_examples=EXAMPLES,
    stateful_step_count=STEPS,
    deadline=None,
    phases=[Phase.generate],  # shrinking takes minutes
    derandomize="SIDE_BY_SIDE_EXAMPLES" not in os.environ,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
)


@pytest.fixture(autouse=True, scope="module")
def _places(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Tell the machines, which take no fixtures, where they may work."""
    SideBySide.places = tmp_path_factory.mktemp("side-by-side")


TestSideBySide = pytest.mark.timeout(0)(SideBySide.TestCase)
TestSideBySide.settings = _RUN
TestInTurns = pytest.mark.timeout(0)(InTurns.TestCase)
TestInTurns.settings = _RUN
