"""One write of a table's rows: begun once, and sent to every task as plain data."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from icechunk_async.errors import AlreadyExistsError, InvalidInputError
from icechunk_async.spark.write.cooperative import CooperativeWrite
from icechunk_async.spark.write.target import WriteTarget
from icechunk_async.spark.write.transactions import is_published
from icechunk_async.sync.portal import run

if TYPE_CHECKING:
    from collections.abc import Sequence

    from icechunk_async.spark.options import WriteOptions
    from icechunk_async.spark.write.transactions import Transaction
    from icechunk_async.sync import ForkSession, Repository
    from icechunk_async.sync.store import IcechunkStore

__all__ = ["WritePlan", "check_mode"]


@dataclass(frozen=True, slots=True)
class WritePlan:
    """One write of rows.

    Attributes:
        write: what tasks take part in.
        options: what was asked for.
        target: the arrays; None if there is nothing to do.
    """

    write: CooperativeWrite
    options: WriteOptions
    target: WriteTarget | None

    @classmethod
    def begin(
        cls,
        options: WriteOptions,
        columns: Sequence[str],
        *,
        overwrite: bool,
        transaction: Transaction | None = None,
        cores: int = 0,
        repository: Repository | None = None,
    ) -> WritePlan:
        """Look at the arrays, and begin to write.

        Args:
            options: what was asked for.
            columns: names of the table's.
            overwrite: rows replace what is there; else they are appended.
            transaction: names the write, if that is known yet.
            cores: tasks that run at a time in one executor; 0 where each is to ask Spark.
            repository: an open one; without it that of the options is opened.

        Raises:
            InvalidInputError: columns and arrays do not go together; see also
                :meth:`WriteTarget.look`.
            AlreadyExistsError: something is there, and was not to be.
        """
        check_mode(options, overwrite=overwrite)
        repository = repository or options.open()
        if is_published(repository, options.branch, transaction):
            return cls(CooperativeWrite.begin(repository, options.branch), options, None)
        looked: list[WriteTarget] = []

        def prepare(store: IcechunkStore) -> None:
            # At the very snapshot that the write begins at: what comes later is a conflict.
            target = WriteTarget.look(store, options, columns)
            looked.append(target)
            if target.growth is not None:
                target.growth.prepare(store)

        write = CooperativeWrite.begin(repository, options.branch, prepare=prepare, cores=cores)
        target = looked[0]
        written = options.if_written != "replace" and _is_written(write.fork(), options, target)
        return cls(write, options, None if written else target)

    @property
    def is_done(self) -> bool:
        """Whether there is nothing to do."""
        return self.target is None


def check_mode(options: WriteOptions, *, overwrite: bool) -> None:
    """Raise InvalidInputError if the mode and the options contradict each other."""
    if overwrite and options.append_dim is not None:
        raise InvalidInputError(
            "mode('overwrite') replaces values, and the option 'append-dim' appends. Use "
            "mode('append'), or leave the option out."
        )
    if not overwrite and options.append_dim is None:
        raise InvalidInputError(
            "mode('append') needs to know along which dimension: option('append-dim', 'time'). To "
            "write to places that the arrays have, use mode('overwrite')."
        )


def _is_written(fork: ForkSession, options: WriteOptions, target: WriteTarget) -> bool:
    """Return whether there is something already, and nothing is to be done then.

    Raises:
        AlreadyExistsError: that is an error.
    """
    for path, _ in target.variables:
        if run(_has_chunks(fork, path)):
            if options.if_written == "ignore":
                return True
            raise AlreadyExistsError(
                f"{path!r} has values already, and the option 'if-written' says that this is an "
                "error. Nothing was written.",
                path=path,
            )
    return False


async def _has_chunks(fork: ForkSession, path: str) -> bool:
    native = await fork._session.session()  # noqa: SLF001 # pyright: ignore[reportPrivateUsage]
    async for batch in native.chunk_coordinates(f"/{path}", batch_size=1):
        if len(batch):
            return True
    return False
