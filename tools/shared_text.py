"""Show methods of the blocking facade in the API reference that take their text from native ones.

An extension of griffe, which reads the source for mkdocstrings and runs nothing. What
`icechunk_async._runtime.blocking.pairs` does with docstrings when the library is imported is done
here for the pages. And data classes that are made late have the arguments of any data class.
"""

from __future__ import annotations

import ast
import copy
import re
from typing import TYPE_CHECKING, Any, Final

import griffe

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = ["SharedText"]

_FACADE: Final = "sync"
_TWIN: Final = re.compile(r"(?:twin|text)_of\((\w+)\.(\w+)\)$")
_BEFORE_CODE: Final = re.compile(r"::(?=\n\n {4})")
_LATE: Final = "icechunk_async._runtime.dataclasses.dataclass"
_KNOWN: Final = "dataclasses.dataclass"
_PAIR: Final = re.compile(r"(asked|owned|iterated|_in_session)\((\w+)\.(\w+)")
_BLOCKING: Final = re.compile(r"(?:(?:class|static)method\()?blocking\((\w+)")
_AWAITED: Final = re.compile(r"Coroutine\[Any, Any, (.*)\]$")


class SharedText(griffe.Extension):
    """Gives what is in the facade the text, or the whole declaration, of the native ones."""

    def on_class_members(self, *, node: Any, cls: griffe.Class, **_: Any) -> None:
        """Note both names of a pair, of which griffe itself sees none."""
        for line in node.body if isinstance(node, ast.ClassDef) else ():
            if isinstance(line, ast.Assign) and isinstance(line.targets[0], ast.Tuple):
                for target in line.targets[0].elts:
                    name = ast.unparse(target)
                    pair = griffe.Attribute(name, value=ast.unparse(line.value))
                    pair.lineno, pair.endlineno = line.lineno, line.end_lineno
                    cls.set_member(name, pair)

    def on_package(self, *, pkg: griffe.Module, **_: Any) -> None:
        """Complete the classes of the facade when the package has been read."""
        # When the whole package was read: a class of the facade may name one of a module that comes
        # later.
        for one in _all(pkg):
            if one.docstring is not None:
                one.docstring.value = as_markdown(one.docstring.value)
            _name_decorator(one)
        for home in _homes(pkg.members.get(_FACADE)):
            for member in list(home.members.values()):
                if isinstance(member, griffe.Function):
                    for decorator in member.decorators:
                        native = _native(home, _TWIN.search(str(decorator.value)))
                        if native is not None:
                            member.docstring = native.docstring
                elif isinstance(member, griffe.Attribute):
                    native = _native(home, _PAIR.match(str(member.value)))
                    if native is not None:
                        home.set_member(member.name, _renamed(native, member, home))
            _add_blocking(home)


def _add_blocking(home: griffe.Class | griffe.Module) -> None:
    """Show `name`, declared as `name = blocking(name_async)`, as a function like the other."""
    for member in list(home.members.values()):
        found = isinstance(member, griffe.Attribute) and _BLOCKING.match(str(member.value))
        awaited = home.members.get(found[1]) if found else None
        if isinstance(awaited, griffe.Function):
            twin = copy.copy(awaited)
            twin.name, twin.parent = member.name, home
            twin.labels = awaited.labels - {"async"}
            result = _AWAITED.match(str(awaited.returns))
            twin.returns = result[1] if result else awaited.returns
            home.set_member(member.name, twin)


def as_markdown(text: str) -> str:
    """Return a docstring as pages show it: two colons before a block of code are one.

    The block itself is indented, in Markdown as in reStructuredText.
    """
    return _BEFORE_CODE.sub(":", text)


def _name_decorator(found: griffe.Object) -> None:
    """Let data classes be known to griffe's own extension, which adds their parameters."""
    decorator = found.members.get("dataclass")
    if isinstance(decorator, griffe.Alias) and decorator.target_path == _LATE:
        decorator.target_path = _KNOWN
    if isinstance(found, griffe.Class) and any(
        getattr(it.value, "canonical_path", "") == _KNOWN for it in found.decorators
    ):
        found.labels.add("dataclass")


def _all(found: griffe.Object) -> Iterator[griffe.Object]:
    yield found
    for member in list(found.members.values()):
        if isinstance(member, griffe.Object):
            yield from _all(member)


def _homes(found: Any) -> Iterator[griffe.Class | griffe.Module]:
    """Iterate over modules and their classes."""
    if isinstance(found, griffe.Class | griffe.Module):
        yield found
    if isinstance(found, griffe.Module):
        for member in list(found.members.values()):
            yield from _homes(member)


def _native(
    home: griffe.Class | griffe.Module, found: re.Match[str] | None
) -> griffe.Function | None:
    if found is None:
        return None
    owner, name = found.groups()[-2:]
    path = home.module.resolve(owner)
    native = home.package.modules_collection[path].all_members[name]
    # A class that is imported into another module is an alias there, without members to copy.
    target = native.final_target if isinstance(native, griffe.Alias) else native
    assert isinstance(target, griffe.Function), f"{path}.{name}"
    return target


def _renamed(
    native: griffe.Function, member: griffe.Attribute, home: griffe.Class | griffe.Module
) -> griffe.Function:
    """Return a copy of a native method under another name, with the result that it has here."""
    # A copy: the native method stays on its own page, under its name.
    twin = copy.copy(native)
    twin.name, twin.parent = member.name, home
    twin.lineno, twin.endlineno = member.lineno, member.endlineno
    twin.returns = _returned(native, member, home)
    if not member.name.endswith("_async"):
        twin.labels = native.labels - {"async"}
    return twin


def _returned(
    native: griffe.Function, member: griffe.Attribute, home: griffe.Class | griffe.Module
) -> Any:
    """Return the annotation of what a method of a pair returns."""
    call: Any = ast.parse(str(member.value), mode="eval").body
    found = native.returns
    if len(call.args) > 1:  # a class, one of its methods, or a function of the module
        maker, _, _ = ast.unparse(call.args[1]).partition(".")
        function = home.module.members.get(maker)
        found = function.returns if isinstance(function, griffe.Function) else maker
    if call.func.id != "iterated":
        return found
    item = str(found).removeprefix("AsyncIterator[").removesuffix("]")
    is_twin = member.name.endswith("_async")
    return f"{'AsyncCloseableIterator' if is_twin else 'Iterator'}[{item}]"
