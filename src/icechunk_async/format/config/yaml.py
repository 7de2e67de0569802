"""YAML text of the configuration file to plain documents and back.

Only events of PyYAML's safe loader and dumper are used, no constructors: scalars stay text until a
field gives the type, because the file follows YAML 1.2 (``yes`` and ``010`` are text) and PyYAML's
resolver version 1.1; and events come one by one, so that neither deep nesting nor repeated aliases
reach the interpreter's stack or memory.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Final, override

import yaml
from yaml.emitter import Emitter

from icechunk_async._runtime.dataclasses import dataclass
from icechunk_async.errors import FormatError
from icechunk_async.format.config.document import Plain, Variant
from icechunk_async.format.config.secrets import veiled_url
from icechunk_async.format.json.values import MAX_DEPTH

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from icechunk_async.format.config.document import Document, Scalar

__all__ = ["dump_yaml", "load_yaml"]

_MAX_BYTES: Final = 2**22
"""PyYAML takes up to a second for a megabyte; ten thousand containers have three of them."""

_MAX_NODES: Final = 250_000
"""Nodes with those that aliases repeat; PyYAML takes three seconds for so many."""

_CORE_TAGS: Final = "tag:yaml.org,2002:"

_AMBIGUOUS: Final = re.compile(
    r"[-+.0-9~<=].*|y|n|yes|no|on|off|true|false|null|", re.IGNORECASE | re.DOTALL
)
"""Text that a reader of some version of YAML would not read as text."""


def load_yaml(data: bytes | memoryview) -> Document:
    """Read one document from bytes that need not be trusted; tagged nodes become one-entry dicts.

    Raises:
        FormatError: it is no YAML, too large, too deep, has keys that are no text or appear
            twice, or has several documents.
    """
    if len(data) > _MAX_BYTES:
        raise FormatError(f"a configuration has {len(data)} bytes; at most {_MAX_BYTES} are read")
    try:
        text = bytes(data).decode().removeprefix("\ufeff")
        return _Builder().document(yaml.parse(text, Loader=yaml.SafeLoader))
    except yaml.MarkedYAMLError as error:
        # Not the whole message, which quotes the text, and with it secrets.
        mark, problem = error.problem_mark, error.problem or error.context
        line = f" in line {mark.line + 1}" if mark else ""
        raise FormatError(f"the configuration is not YAML{line}: {problem}") from None
    except yaml.YAMLError as error:
        raise FormatError("the configuration has characters that YAML does not allow") from error
    except (ValueError, OverflowError) as error:
        # Also escapes that name no character: the scanner hands them to chr() unchecked.
        raise FormatError(f"the configuration is not YAML text: {type(error).__name__}") from None


def dump_yaml(document: Document) -> bytes:
    """Write one document in block style, as the official engine lays it out."""
    text = yaml.emit(
        [
            yaml.StreamStartEvent(),
            yaml.DocumentStartEvent(explicit=False),
            *_events(document, None),
            yaml.DocumentEndEvent(explicit=False),
            yaml.StreamEndEvent(),
        ],
        Dumper=_Emitter,
        width=2**31,
        allow_unicode=True,
    )
    return text.encode()


class _Emitter(Emitter):
    """Leaves tagged numbers without quotes: quoted they would be text to readers."""

    @override
    def choose_scalar_style(self) -> str:
        style = super().choose_scalar_style()
        event, analysis = self.event, self.analysis
        tagged = isinstance(event, yaml.ScalarEvent) and event.tag is not None and not event.style
        return "" if tagged and analysis is not None and analysis.allow_block_plain else style


def _events(document: Document, tag: str | None) -> Iterator[yaml.Event]:
    match document:
        case Variant(name, value):
            yield from _events(value, f"!{name}")
        case dict():
            yield yaml.MappingStartEvent(anchor=None, tag=tag, implicit=tag is None)
            for key, value in document.items():
                yield _scalar(key, None)
                yield from _events(value, None)
            yield yaml.MappingEndEvent()
        case list():
            yield yaml.SequenceStartEvent(anchor=None, tag=tag, implicit=tag is None)
            for item in document:
                yield from _events(item, None)
            yield yaml.SequenceEndEvent()
        case _:
            yield _scalar(document, tag)


def _scalar(value: Scalar, tag: str | None) -> yaml.Event:
    # Quoted where another version of YAML could read something else, as the official engine does.
    style: str | None = None
    match value:
        case None:
            text = "null"
        case bool():
            text = "true" if value else "false"
        case int():
            text = str(value)
        case str():
            text = value
            if not value.isprintable():
                style = '"'
            elif _AMBIGUOUS.fullmatch(value):
                style = "'"
    return yaml.ScalarEvent(
        anchor=None, tag=tag, implicit=(tag is None, tag is None), value=text, style=style
    )


@dataclass(slots=True)
class _Open:
    """A list or map whose end has not come; of a map keys and values in turn."""

    tag: str | None
    anchor: str | None
    is_map: bool
    nodes_before: int
    items: list[Document]

    def close(self) -> Document:
        if not self.is_map:
            return _tagged(self.tag, self.items)
        entries: dict[str, Document] = {}
        for key, value in zip(self.items[::2], self.items[1::2], strict=True):
            if not isinstance(key, str):
                raise FormatError("the configuration has a key that is no text")
            # YAML forbids it, PyYAML lets the last one win, and other parsers the first: engines
            # would differ.
            if key in entries:
                raise FormatError(
                    f"the configuration has the key {veiled_url(key)!r:.64} twice in one map"
                )
            entries[key] = value
        return _tagged(self.tag, entries)


class _Builder:
    """Builds the document from events, with an explicit stack."""

    def __init__(self) -> None:
        self._stack: list[_Open] = []
        self._anchors: dict[str, tuple[Document, int]] = {}
        self._nodes = 0
        self._documents: list[Document] = []

    def document(self, events: Iterable[yaml.Event]) -> Document:
        for event in events:
            self._take(event)
        if len(self._documents) > 1:
            raise FormatError("the configuration has several YAML documents")
        return self._documents[0] if self._documents else None

    def _take(self, event: yaml.Event) -> None:
        match event:
            case yaml.ScalarEvent():
                # Raises here, and not when the text is used, for escapes such as "\ud800", which
                # name half a character.
                event.value.encode()
                text = Plain(event.value) if event.style is None else event.value
                self._count(1)
                self._place(_tagged(event.tag, text), event.anchor, 1)
            case yaml.SequenceStartEvent() | yaml.MappingStartEvent():
                if len(self._stack) == MAX_DEPTH:
                    raise FormatError(f"the configuration is nested more than {MAX_DEPTH} deep")
                is_map = isinstance(event, yaml.MappingStartEvent)
                self._stack.append(_Open(event.tag, event.anchor, is_map, self._nodes, []))
                self._count(1)
            case yaml.SequenceEndEvent() | yaml.MappingEndEvent():
                done = self._stack.pop()
                self._place(done.close(), done.anchor, self._nodes - done.nodes_before)
            case yaml.AliasEvent():
                # Counted with all that it repeats: aliases of aliases grow exponentially, and
                # readers of the document walk through each of them.
                value, weight = self._anchors.get(event.anchor or "", (None, 0))
                if not weight:
                    raise FormatError("the configuration has an alias of nothing before it")
                self._count(weight)
                self._place(value, None, weight)
            case _:
                pass

    def _count(self, nodes: int) -> None:
        self._nodes += nodes
        if self._nodes > _MAX_NODES:
            raise FormatError(f"the configuration has more than {_MAX_NODES} nodes")

    def _place(self, value: Document, anchor: str | None, weight: int) -> None:
        if anchor is not None:
            self._anchors[anchor] = value, weight
        (self._stack[-1].items if self._stack else self._documents).append(value)


def _tagged(tag: str | None, value: Document) -> Document:
    # A choice that carries a value is a tag here. In FlexBuffers it is a map of one entry, which is
    # what readers of either get.
    if tag is None or tag == "!":
        return value
    if tag.startswith(_CORE_TAGS):
        return str(value) if tag == f"{_CORE_TAGS}str" and isinstance(value, str) else value
    return {tag.removeprefix("!"): value}
