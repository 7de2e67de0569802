# Parsing and emitting events only: what is not here builds objects from untrusted text.
from collections.abc import Iterable, Iterator

from yaml.emitter import Emitter

class YAMLError(Exception): ...

class Mark:
    line: int

class MarkedYAMLError(YAMLError):
    context: str | None
    problem: str | None
    problem_mark: Mark | None

class SafeLoader: ...
class Event: ...

class NodeEvent(Event):
    anchor: str | None

class StreamStartEvent(Event):
    def __init__(self) -> None: ...

class StreamEndEvent(Event):
    def __init__(self) -> None: ...

class DocumentStartEvent(Event):
    def __init__(self, *, explicit: bool) -> None: ...

class DocumentEndEvent(Event):
    def __init__(self, *, explicit: bool) -> None: ...

class AliasEvent(NodeEvent): ...

class ScalarEvent(NodeEvent):
    tag: str | None
    implicit: tuple[bool, bool]
    value: str
    style: str | None
    def __init__(
        self,
        *,
        anchor: str | None,
        tag: str | None,
        implicit: tuple[bool, bool],
        value: str,
        style: str | None,
    ) -> None: ...

class CollectionStartEvent(NodeEvent):
    tag: str | None
    implicit: bool
    def __init__(self, *, anchor: str | None, tag: str | None, implicit: bool) -> None: ...

class SequenceStartEvent(CollectionStartEvent): ...
class MappingStartEvent(CollectionStartEvent): ...

class SequenceEndEvent(Event):
    def __init__(self) -> None: ...

class MappingEndEvent(Event):
    def __init__(self) -> None: ...

def parse(stream: str, Loader: type[SafeLoader]) -> Iterator[Event]: ...  # noqa: N803
def emit(
    events: Iterable[Event],
    *,
    Dumper: type[Emitter],  # noqa: N803
    width: int,
    allow_unicode: bool,
) -> str: ...
