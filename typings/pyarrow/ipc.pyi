from types import TracebackType
from typing import Self

import pyarrow as pa

class RecordBatchStreamReader:
    def __enter__(self) -> Self: ...
    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None: ...
    def read_all(self) -> pa.Table: ...

class RecordBatchStreamWriter:
    def __enter__(self) -> Self: ...
    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None: ...
    def write_table(self, table: pa.Table) -> None: ...

def open_stream(source: bytes) -> RecordBatchStreamReader: ...
def new_stream(sink: pa.BufferOutputStream, schema: pa.Schema) -> RecordBatchStreamWriter: ...
