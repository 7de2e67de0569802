"""One write of rows, prepared once and sent to every task as plain data."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pyspark.sql.types import StructType, YearMonthIntervalType

from icechunk_async._runtime.dataclasses import dataclass
from icechunk_async.errors import AlreadyExistsError, InvalidInputError
from icechunk_async.spark.shared import has_chunks
from icechunk_async.spark.write.cooperative import CooperativeWrite, is_published
from icechunk_async.spark.write.target import WriteTarget

if TYPE_CHECKING:
    from collections.abc import Sequence

    import pyarrow as pa

    from icechunk_async.spark.options import WriteOptions
    from icechunk_async.spark.write.cooperative import Transaction
    from icechunk_async.sync import ForkSession, Repository
    from icechunk_async.sync.store import IcechunkStore

__all__ = ["WritePlan", "check_types"]


def check_types(schema: StructType | pa.Schema) -> None:
    """Check the types of a table's columns.

    Raises:
        InvalidInputError: Arrow's Python package has no class for one, so that no task could read
            it.
    """
    # A schema of Arrow comes from Sail, and Arrow has a class for each of its types.
    fields = schema.fields if isinstance(schema, StructType) else []
    for it in fields:
        if isinstance(it.dataType, YearMonthIntervalType):
            raise InvalidInputError(
                f"The column {it.name!r} has {it.dataType.simpleString()}, an interval of months, "
                "which no array can hold. Nothing was written. Convert it to a number, or leave it "
                "out.",
                column=it.name,
            )


@dataclass(frozen=True, slots=True)
class WritePlan:
    """One write of rows, prepared once and sent to every task as plain data.

    Attributes:
        write: the write in which tasks take part.
        options: the request.
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
        """Look up the arrays, and begin a write.

        Args:
            options: the request.
            columns: names of the table's columns.
            overwrite: whether rows replace existing values; otherwise they are appended.
            transaction: names the write, if that is known yet.
            cores: tasks of one executor that share the budget; 0 if each has to ask Spark.
            repository: an open repository; by default that of the options is opened.

        Raises:
            InvalidInputError: columns and arrays do not go together; see also `WriteTarget.look`.
            AlreadyExistsError: an array has values, and the options refuse that.
        """
        options.check_mode(overwrite=overwrite)
        repository = repository or options.open()
        # Before the arrays are looked at: an append that landed made its coordinates exist, which
        # looking would refuse.
        if is_published(repository, options.branch, transaction):
            return cls(CooperativeWrite.begin(repository, options.branch), options, None)
        # `prepare` is called once, before tasks exist; what it looked up is handed out by this
        # list.
        looked: list[WriteTarget] = []

        def prepare(store: IcechunkStore) -> None:
            # At the snapshot at which the write begins, so that later changes are conflicts.
            target = WriteTarget.look(store, options, columns)
            looked.append(target)
            if target.growth is not None:
                target.growth.prepare(store)

        write = CooperativeWrite.begin(
            repository,
            options.branch,
            prepare=prepare,
            cores=cores,
            max_requests=options.max_requests or 0,
        )
        target = looked[0]
        skip = options.if_written != "replace" and _is_written(write.fork(), options, target)
        return cls(write, options, None if skip else target)

    @property
    def is_done(self) -> bool:
        """Whether there is nothing to do."""
        return self.target is None


def _is_written(fork: ForkSession, options: WriteOptions, target: WriteTarget) -> bool:
    """Return whether an array already has values and the write is to be skipped.

    Raises:
        AlreadyExistsError: an array has values, and the options refuse that.
    """
    for path, _ in target.variables:
        if has_chunks(fork, path):
            if options.if_written == "ignore":
                return True
            raise AlreadyExistsError(
                f"{path!r} has values already, and the option 'if-written' makes that an error. "
                "Nothing was written.",
                path=path,
            )
    return False
