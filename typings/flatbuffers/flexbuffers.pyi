# ruff: noqa: N802 -- the library's own spelling
from collections.abc import Sequence
from contextlib import AbstractContextManager
from enum import IntEnum
from typing import Any

class BitWidth(IntEnum):
    W8 = 0
    W16 = 1
    W32 = 2
    W64 = 3

class Type(IntEnum):
    NULL = 0
    INT = 1
    UINT = 2
    FLOAT = 3
    KEY = 4
    STRING = 5
    INDIRECT_INT = 6
    INDIRECT_UINT = 7
    INDIRECT_FLOAT = 8
    MAP = 9
    VECTOR = 10
    VECTOR_INT = 11
    VECTOR_UINT = 12
    VECTOR_FLOAT = 13
    VECTOR_KEY = 14
    VECTOR_STRING_DEPRECATED = 15
    VECTOR_INT2 = 16
    VECTOR_UINT2 = 17
    VECTOR_FLOAT2 = 18
    VECTOR_INT3 = 19
    VECTOR_UINT3 = 20
    VECTOR_FLOAT3 = 21
    VECTOR_INT4 = 22
    VECTOR_UINT4 = 23
    VECTOR_FLOAT4 = 24
    BLOB = 25
    BOOL = 26
    VECTOR_BOOL = 36

class Value:
    @property
    def Type(self) -> Type: ...

class Builder:
    _buf: bytearray

    def __init__(
        self,
        share_strings: bool = False,
        share_keys: bool = True,
        force_min_bit_width: BitWidth = ...,
    ) -> None: ...
    def __len__(self) -> int: ...
    @property
    def LastValue(self) -> Value: ...
    def Finish(self) -> bytearray: ...
    def _ReadKey(self, offset: int) -> bytearray: ...
    def Null(self) -> None: ...
    def Bool(self, value: bool, /) -> None: ...
    def Int(self, value: int, /, byte_width: int = 0) -> None: ...
    def UInt(self, value: int, /, byte_width: int = 0) -> None: ...
    def Float(self, value: float, /, byte_width: int = 0) -> None: ...
    def IndirectInt(self, value: int, /, byte_width: int = 0) -> None: ...
    def IndirectUInt(self, value: int, /, byte_width: int = 0) -> None: ...
    def IndirectFloat(self, value: float, /, byte_width: int = 0) -> None: ...
    def String(self, value: str, /) -> None: ...
    def Blob(self, value: bytes, /) -> None: ...
    def Key(self, value: bytes | str) -> int: ...
    def ReuseValue(self, value: Value, /) -> None: ...
    def Add(self, value: object, /) -> None: ...
    def Vector(self) -> AbstractContextManager[Builder]: ...
    def TypedVector(self) -> AbstractContextManager[Builder]: ...
    def Map(self) -> AbstractContextManager[Builder]: ...
    def FixedTypedVectorFromElements(
        self,
        elements: Sequence[float],
        /,
        element_type: Type | None = None,
        byte_width: int = 0,
    ) -> None: ...

def Dumps(obj: object) -> bytearray: ...
def Loads(buf: bytes | bytearray) -> Any: ...
