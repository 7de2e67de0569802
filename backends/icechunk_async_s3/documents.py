"""The XML documents that servers reply with. Pure."""

from __future__ import annotations

from typing import TYPE_CHECKING
from xml.etree.ElementTree import XMLParser

if TYPE_CHECKING:
    from xml.etree.ElementTree import Element

__all__ = ["fields_of", "parse", "tag_of"]


def parse(body: bytes | memoryview) -> Element:
    """Return the root of a document.

    Raises:
        ParseError, ValueError: it is no XML, or declares entities, which could expand endlessly.
    """
    text = bytes(body).decode()
    # In UTF-16, which the parser recognizes by itself, every second byte of a document type is 0.
    if "\0" in text or "<!DOCTYPE" in text:
        raise ValueError("it has a document type, or is not UTF-8")
    # Its own word for the encoding does not count, which could hide a document type, too.
    parser = XMLParser(encoding="utf-8")  # noqa: S314 -- without entities
    parser.feed(text)
    root: Element = parser.close()
    return root


def tag_of(element: Element) -> str:
    """Return a tag without its namespace, which some servers leave out."""
    return element.tag.rpartition("}")[2]


def fields_of(element: Element) -> dict[str, str]:
    """Return the texts of the children by their tags; of several with one tag, the last."""
    return {tag_of(child): child.text or "" for child in element}
