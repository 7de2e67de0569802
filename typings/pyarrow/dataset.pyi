# ruff: noqa: A002 - names of pyarrow
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from pyarrow import RecordBatch, Schema, Table
from pyarrow.compute import Expression
from pyarrow.fs import FileSystem

class FileFormat:
    def make_fragment(self, file: str, filesystem: FileSystem) -> Fragment: ...

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
    @property
    def schema(self) -> Schema: ...
    def to_table(
        self,
        columns: Any = ...,
        filter: Expression | None = ...,
        batch_size: int = ...,
        **kwargs: Any,
    ) -> Table: ...

class FileSystemDataset(Dataset):
    def __init__(
        self,
        fragments: Sequence[Fragment],
        schema: Schema,
        format: FileFormat,
        filesystem: FileSystem,
    ) -> None: ...
    @staticmethod
    def from_paths(
        paths: Sequence[str],
        schema: Schema,
        format: FileFormat,
        filesystem: FileSystem,
        partitions: Sequence[Expression],
    ) -> FileSystemDataset: ...
    def get_fragments(self, filter: Expression | None = ...) -> Iterator[Any]: ...

def dataset(source: Table | RecordBatch) -> Dataset: ...
