"""`propose`, `review`, `accept`, `reject`, `protect` and `unprotect`."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import anyio
import typer
from rich.text import Text

from icechunk_async._runtime.dataclasses import dataclass
from icechunk_async.cli.completing import complete_branch, complete_ref
from icechunk_async.cli.console import (
    ADDED,
    BRANCH,
    REMOVED,
    SNAPSHOT,
    make_table,
    plain,
    time_head,
    time_of,
)
from icechunk_async.cli.declaring import repository_command
from icechunk_async.errors import InvalidInputError

if TYPE_CHECKING:
    from datetime import datetime

    from rich.console import Console

    from icechunk_async import Repository
    from icechunk_async.proposals import Check, Proposal

__all__ = ["register"]

_Source = Annotated[
    str, typer.Argument(metavar="REF", autocompletion=complete_ref, help="What to propose.")
]
_Id = Annotated[
    str, typer.Argument(metavar="ID", help="A proposal, or the source of one open proposal.")
]
_MaybeId = Annotated[
    str | None,
    typer.Argument(metavar="[ID]", help="A proposal, or the source of an open one."),
]
_Into = Annotated[
    str,
    typer.Option(
        "--into", metavar="BRANCH", autocompletion=complete_branch, help="The branch that takes it."
    ),
]
_Checks = Annotated[
    list[str] | None,
    typer.Option(
        "--check",
        metavar="NAME=COMMAND",
        help="Run this command on the merged state; exit code 0 means that it passes. No shell "
        "reads it. May be repeated.",
    ),
]
_Timeout = Annotated[
    float, typer.Option("--timeout", metavar="SECONDS", min=0.01, help="Time for each check.")
]
_Title = Annotated[str | None, typer.Option("--title", help="What it is about, on one line.")]
_Message = Annotated[str | None, typer.Option("--message", "-m", help="The message of the merge.")]
_All = Annotated[bool, typer.Option("--all", help="List also those that were accepted or closed.")]
_Html = Annotated[
    Path | None,
    typer.Option("--html", metavar="FILE", help="Write the page of the proposal to a file."),
]
_Refuse = Annotated[
    bool, typer.Option("--refuse-moved", help="Do not merge anew if the branch has moved.")
]
_Reason = Annotated[str, typer.Option("--reason", help="Why it is rejected.")]
_Force = Annotated[
    bool, typer.Option("--force", help="Even if a process began to accept it and did not finish.")
]
_Branch = Annotated[
    str, typer.Argument(metavar="BRANCH", autocompletion=complete_branch, help="The branch.")
]
_Names = Annotated[
    list[str] | None,
    typer.Option("--check", metavar="NAME", help="A check that must pass. May be repeated."),
]


@dataclass(frozen=True, slots=True)
class CheckLine:
    """The result of a check."""

    name: str
    outcome: str
    """``passed``, ``failed``, ``error``, ``timed out`` or ``not run``."""
    detail: str
    seconds: float | None
    ended_at: datetime | None


@dataclass(frozen=True, slots=True)
class ArrayLine:
    """The changes of one array."""

    path: str
    added: int
    changed: int
    removed: int
    cells: int | None
    changed_cells: int
    min_change: float | None
    mean_change: float | None
    max_change: float | None
    note: str


@dataclass(frozen=True, slots=True)
class NodeLine:
    """A node that is created, deleted, moved, or given other metadata."""

    kind: str
    path: str
    previous_path: str | None


@dataclass(frozen=True, slots=True)
class ProposalView:
    """The document of `propose`, `accept`, `reject`, and of `review` with an id."""

    id: str
    state: str
    title: str
    message: str
    source: str
    source_id: str
    into: str
    target_id: str
    candidate_id: str
    passed: bool
    created_at: datetime
    changed_at: datetime
    reason: str
    checks: list[CheckLine]
    nodes: list[NodeLine]
    more_nodes: int
    arrays: list[ArrayLine]
    more_arrays: int


@dataclass(frozen=True, slots=True)
class ProposalLine:
    """A line of a list of proposals."""

    id: str
    state: str
    passed: bool
    source: str
    into: str
    created_at: datetime
    title: str


@dataclass(frozen=True, slots=True)
class ProposalList:
    """The document of `review` without an id."""

    proposals: list[ProposalLine]


@dataclass(frozen=True, slots=True)
class ProtectedBranch:
    """A branch that changes only by proposals."""

    branch: str
    checks: list[str]


@dataclass(frozen=True, slots=True)
class Protections:
    """The document of `protect` and `unprotect`."""

    branches: list[ProtectedBranch]


async def propose(
    repository: Repository,
    source: _Source,
    *,
    into: _Into = "main",
    check: _Checks = None,
    timeout: _Timeout = 600.0,  # noqa: ASYNC109 -- of each check
    title: _Title = None,
    message: _Message = None,
) -> ProposalView:
    """Propose what a branch changed, and run checks on the state that would be merged.

    Commands find that state in ICECHUNK_ASYNC_URL and ICECHUNK_ASYNC_SNAPSHOT.

    Exit code 1 if a check did not pass; the proposal is there.

    JSON keys: id, state, title, message, source, source_id, into, target_id, candidate_id, passed,
    created_at, changed_at, reason, checks (each: name, outcome, detail, seconds, ended_at), nodes
    (each: kind, path, previous_path), more_nodes, arrays (each: path, added, changed, removed,
    cells, changed_cells, min_change, mean_change, max_change, note), more_arrays.
    """
    made = await repository.propose(
        source, into=into, checks=_commands(check, timeout), title=title, message=message
    )
    return _view(made)


async def review(
    repository: Repository,
    proposal: _MaybeId = None,
    *,
    every: _All = False,
    html: _Html = None,
) -> ProposalList | ProposalView:
    """List proposals, or show one; with --html, write its page.

    JSON keys: proposals (each: id, state, passed, source, into, created_at, title); with an id as
    in propose.
    """
    if proposal is None:
        if html is not None:
            raise typer.BadParameter("--html needs the id of a proposal")
        found = await repository.proposals(include_ended=every)
        return ProposalList(
            [
                ProposalLine(
                    str(it.id),
                    it.state.value,
                    it.passed,
                    it.source,
                    it.into,
                    it.created_at,
                    it.title,
                )
                for it in found
            ]
        )
    shown = await _find(repository, proposal)
    if html is not None:
        try:
            await anyio.Path(html).write_text(shown.page(), encoding="utf-8")
        except OSError as error:
            raise typer.BadParameter(f"{html} cannot be written: {error.strerror}") from None
    return _view(shown)


async def accept(
    repository: Repository,
    proposal: _Id,
    *,
    check: _Checks = None,
    timeout: _Timeout = 600.0,  # noqa: ASYNC109 -- of each check
    refuse_moved: _Refuse = False,
) -> ProposalView:
    """Publish a proposal if all its checks passed on the very state that is merged.

    If the branch has moved, the merge is made anew and the checks run again: pass the commands as
    --check, since they are never read from the storage.

    Exit code 1 if a check did not pass; then nothing is published.

    JSON keys: as in propose.
    """
    opened = await _find(repository, proposal)
    checks = _commands(check, timeout)
    await opened.accept(checks, when_moved="refuse" if refuse_moved else "retry")
    return _view(opened)


async def reject(
    repository: Repository, proposal: _Id, *, reason: _Reason = "", force: _Force = False
) -> ProposalView:
    """Close a proposal without publishing it.

    JSON keys: as in propose.
    """
    opened = await _find(repository, proposal)
    await opened.close(reason, force=force)
    return _view(opened)


async def protect(
    repository: Repository, branch: _Branch = "main", *, check: _Names = None
) -> Protections:
    """Let a branch change only by proposals, for everyone who writes with this library.

    The official engine and earlier versions of this library do not know of it.

    JSON keys: branches (each: branch, checks).
    """
    await repository.protect_branch(branch, checks=check or ())
    return await _protections(repository)


async def unprotect(repository: Repository, branch: _Branch = "main") -> Protections:
    """Let a branch be changed directly again.

    JSON keys: branches (each: branch, checks), those that are still protected.
    """
    await repository.unprotect_branch(branch)
    return await _protections(repository)


async def _protections(repository: Repository) -> Protections:
    found = await repository.protected_branches()
    return Protections([ProtectedBranch(it, sorted(names)) for it, names in sorted(found.items())])


async def _find(repository: Repository, named: str) -> Proposal:
    """Return the proposal of an id, or the only open one of a source."""
    # Sources first: a branch may be named like the id of a proposal, and people type branches.
    found = [it for it in await repository.proposals() if it.source == named]
    if len(found) == 1:
        return found[0]
    if found:
        ids = ", ".join(str(it.id) for it in found)
        raise InvalidInputError(
            f"{named!r} is the source of {len(found)} open proposals: {ids}. Give the id of one."
        )
    try:
        return await repository.proposal(named)
    except InvalidInputError:
        raise InvalidInputError(
            f"{named!r} is neither the id of a proposal nor the source of an open one. "
            "'icechunk-async review' lists the open ones, and with --all those that ended."
        ) from None


def _commands(given: list[str] | None, seconds: float) -> list[Check]:
    """Return the checks of options ``name=command``."""
    from icechunk_async.proposals import Check  # noqa: PLC0415 -- slow to import

    found: list[Check] = []
    for text in given or ():
        name, separator, command = text.partition("=")
        try:
            # As a shell splits words, and without one: names in a repository cannot become
            # commands.
            arguments = shlex.split(command)
        except ValueError as error:
            raise typer.BadParameter(f"{command!r} is no command: {error}") from None
        if not (separator and name and arguments):
            raise typer.BadParameter(f"{text!r} is not of the form NAME=COMMAND")
        found.append(Check(name, arguments, seconds))
    return found


def _view(proposal: Proposal) -> ProposalView:
    results = {it.name: it for it in proposal.results}
    checks = [
        CheckLine(name, "not run", "", None, None)
        if (it := results.get(name)) is None
        else CheckLine(name, it.outcome, it.detail, it.seconds, it.ended_at)
        for name in dict.fromkeys([*proposal.checks, *results])
    ]
    review = proposal.review
    return ProposalView(
        str(proposal.id),
        proposal.state.value,
        proposal.title,
        proposal.message,
        proposal.source,
        str(proposal.source_id),
        proposal.into,
        str(proposal.candidate.target_id),
        str(proposal.candidate.snapshot_id),
        # Also those that were run beside the required ones, and that the proposal itself does not
        # ask for.
        all(it.outcome == "passed" for it in checks),
        proposal.created_at,
        proposal.changed_at,
        proposal.reason,
        checks,
        [NodeLine(it.kind, it.path, it.previous_path) for it in review.nodes],
        review.more_nodes,
        [
            ArrayLine(
                it.path,
                it.added,
                it.changed,
                it.removed,
                it.cells,
                it.changed_cells,
                it.min_change,
                it.mean_change,
                it.max_change,
                it.note,
            )
            for it in review.arrays
        ],
        review.more_arrays,
    )


def _show_review(document: ProposalList | ProposalView, console: Console) -> None:
    if isinstance(document, ProposalView):
        _show(document, console)
        return
    if not document.proposals:
        console.print("There are no open proposals.")
        return
    table = make_table(
        "PROPOSAL", "STATE", "CHECKS", "SOURCE", "INTO", time_head("MADE", console), "MESSAGE"
    )
    for it in document.proposals:
        table.add_row(
            Text(it.id, SNAPSHOT),
            Text(it.state),
            _verdict("passed" if it.passed else "not passed"),
            plain(it.source, BRANCH),
            plain(it.into, BRANCH),
            time_of(it.created_at, console),
            plain(it.title),
        )
    console.print(table)


def _verdict(outcome: str) -> Text:
    return Text(outcome, ADDED if outcome == "passed" else REMOVED)


def _show(document: ProposalView, console: Console) -> None:
    console.print(plain(document.title, "bold"), soft_wrap=True)
    console.print(
        Text.assemble(
            "Proposal ",
            (document.id, SNAPSHOT),
            f" ({document.state}): ",
            plain(document.source, BRANCH),
            " into ",
            plain(document.into, BRANCH),
            f", merged as snapshot {document.candidate_id}.",
        ),
        soft_wrap=True,
    )
    for it in document.checks:
        took = "" if it.seconds is None else f" in {it.seconds:.3f} s"
        said = Text.assemble("  check ", plain(it.name, "bold"), " ", _verdict(it.outcome), took)
        if it.detail:
            said = Text.assemble(said, ": ", plain(it.detail.strip().splitlines()[-1]))
        console.print(said, soft_wrap=True)
    for node in document.nodes:
        before = "" if node.previous_path is None else f"{node.previous_path} -> "
        console.print(Text.assemble(f"  {node.kind} ", plain(before + node.path)), soft_wrap=True)
    if document.more_nodes:
        console.print(f"  and {document.more_nodes} more nodes")
    for array in document.arrays:
        console.print(Text.assemble("  ", plain(array.path), _array(array)), soft_wrap=True)
    if document.more_arrays:
        console.print(f"  and {document.more_arrays} more arrays")
    console.print(_end(document), soft_wrap=True)


def _array(array: ArrayLine) -> str:
    text = f": chunks +{array.added:,} ~{array.changed:,} -{array.removed:,}"
    if array.cells is not None:
        text += f"; {array.changed_cells:,} of {array.cells:,} cells changed"
    if array.min_change is not None:
        text += f", by {array.min_change:+.6g} to {array.max_change:+.6g}"
    return text


def _end(document: ProposalView) -> Text:
    if document.state == "accepted":
        branch = plain(document.into, BRANCH)
        return Text.assemble("Accepted. Branch ", branch, f" took {document.candidate_id}.")
    if document.state == "closed":
        return Text.assemble("Closed. ", plain(document.reason))
    if document.state == "accepting":
        return Text("A process is accepting it, or was killed while it did: accept it to find out.")
    if document.passed:
        return Text("It can be accepted. Nothing is published yet.")
    return Text("It cannot be accepted yet: checks did not pass. Nothing is published.")


def _show_protections(document: Protections, console: Console) -> None:
    if not document.branches:
        console.print("No branch is protected.")
    for it in document.branches:
        checks = f" with the checks {', '.join(it.checks)}" if it.checks else ""
        text = Text.assemble("Branch ", plain(it.branch, BRANCH), " changes only by proposals")
        console.print(Text.assemble(text, plain(f"{checks}.")), soft_wrap=True)


def _not_passed(document: ProposalView) -> bool:
    # So that a job that proposes fails where its checks do; the proposal is there in any case.
    return document.state == "open" and not document.passed


def register(app: typer.Typer) -> None:
    """Add the commands."""
    app.command()(repository_command(propose, _show, has_failed=_not_passed))
    app.command()(repository_command(review, _show_review))
    app.command()(repository_command(accept, _show))
    app.command()(repository_command(reject, _show))
    app.command()(repository_command(protect, _show_protections))
    app.command()(repository_command(unprotect, _show_protections))
