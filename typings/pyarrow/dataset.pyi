# ruff: noqa: A002 - names of pyarrow
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from pyarrow import RecordBatch, Schema, Table
from pyarrow.compute import Expression
from pyarrow.fs import FileSystem

class FileFormat: ...
class IpcFileFormat(FileFormat): ...

class Fragment:
    path: str

class Scanner:
    @staticmethod
    def from_batches(
        source: Iterable[RecordBatch] | Iterator[RecordBatch],
        *,
        schema: Schema | None = ...,
        **kwargs: Any,
    ) -> Scanner: ...

class Dataset:
    schema: Schema
    def to_table(self, *, filter: Expression) -> Table: ...

class FileSystemDataset(Dataset):
    @staticmethod
    def from_paths(
        paths: Sequence[str],
        schema: Schema,
        format: FileFormat,
        filesystem: FileSystem,
        partitions: Sequence[Expression],
    ) -> FileSystemDataset: ...
    def get_fragments(self, filter: Expression | None = ...) -> Iterator[Fragment]: ...

def dataset(source: Table) -> Dataset: ...
