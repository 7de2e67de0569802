from collections.abc import Sequence
from typing import Any, BinaryIO

import pyarrow as pa
from pyarrow.compute import Expression

def read_table(source: BinaryIO) -> pa.Table: ...
def write_table(table: pa.Table, where: str | pa.BufferOutputStream, **options: Any) -> None: ...
def read_metadata(where: pa.BufferReader) -> FileMetaData: ...

class Statistics:
    has_min_max: bool
    min: Any
    max: Any

class ColumnChunkMetaData:
    path_in_schema: str
    dictionary_page_offset: int | None
    data_page_offset: int
    total_compressed_size: int
    is_stats_set: bool
    statistics: Statistics | None

class RowGroupMetaData:
    num_columns: int
    num_rows: int
    def column(self, i: int) -> ColumnChunkMetaData: ...

class ColumnSchema:
    path: str
    physical_type: str

class ParquetSchema:
    def column(self, i: int) -> ColumnSchema: ...

class FileMetaData:
    num_rows: int
    num_columns: int
    num_row_groups: int
    schema: ParquetSchema
    def row_group(self, i: int) -> RowGroupMetaData: ...

class ParquetFile:
    metadata: FileMetaData
    schema_arrow: pa.Schema
    def __init__(self, source: pa.BufferReader, **options: Any) -> None: ...
    def read_row_groups(
        self, row_groups: list[int], columns: Sequence[str], use_threads: bool
    ) -> pa.Table: ...

def filters_to_expression(filters: Any) -> Expression: ...
