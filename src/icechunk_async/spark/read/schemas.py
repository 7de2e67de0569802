"""Schemas as the engines hand them over: Spark its own types, Sail those of Arrow."""

from __future__ import annotations

from inspect import signature
from typing import TYPE_CHECKING

import pyarrow as pa
from pyspark.sql.pandas.types import to_arrow_schema
from pyspark.sql.types import StructType

from icechunk_async.errors import InvalidInputError

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = ["ArrowStructType", "arrow_schema", "as_asked", "check_pushing"]


class ArrowStructType(StructType):
    """Columns for Spark, which can also be taken as an Arrow schema.

    Sail takes types of Spark as well, but has no zone to convert those of instants with, and fails
    for each table that has some. It looks for Arrow's own protocol first.
    """

    @classmethod
    def typeName(cls) -> str:  # noqa: N802 -- PySpark's name
        """Return the name that Spark knows the type by, which PySpark makes of the class's."""
        return StructType.typeName()

    def __arrow_c_schema__(self) -> object:
        """Return the columns as a capsule of Arrow's C data interface."""
        return arrow_schema(self).__arrow_c_schema__()


def arrow_schema(schema: StructType | pa.Schema) -> pa.Schema:
    """Return a schema as an Arrow schema, with instants in UTC.

    PySpark 4.1 has no argument for the zone and always uses UTC.
    """
    if isinstance(schema, pa.Schema):
        return pa.schema([(it.name, _in_utc(it.type)) for it in schema])
    zoned = "timezone" in signature(to_arrow_schema).parameters
    return to_arrow_schema(schema, timezone="UTC") if zoned else to_arrow_schema(schema)


def _in_utc(kind: pa.DataType) -> pa.DataType:
    # Spark's type without a zone is Arrow's without one. All others are instants, whatever zone
    # they are shown in.
    zoned = pa.types.is_timestamp(kind) and kind != pa.timestamp("us")
    return pa.timestamp("us", "UTC") if zoned else kind


def as_asked(
    batches: Iterator[pa.RecordBatch], schema: StructType | pa.Schema
) -> Iterator[pa.RecordBatch]:
    """Return batches of `arrow_schema(schema)` as the engine wants them.

    Spark takes instants in any zone. Sail refuses them but in that of its session, which a schema
    that the query gives has.
    """
    if not isinstance(schema, pa.Schema) or arrow_schema(schema) == schema:
        return batches
    # A cast of instants moves no number: only the zone in the type differs.
    return (it.cast(schema) for it in batches)


def check_pushing(schema: StructType | pa.Schema) -> None:
    """Check that the filters of the engine mean what the query means.

    Raises:
        InvalidInputError: they are those of Sail.
    """
    if isinstance(schema, pa.Schema):
        raise InvalidInputError(
            "The option 'push-filters' does not go with Sail, which hands over a filter without "
            "the casts in it, such as 'cast(x as int) = 3' as 'x = 3', so that rows would be "
            "missing. Leave it out, and give conditions by the option 'where'."
        )
