"""Every public name of the official package, and how the facade's differs. Reads; runs nothing."""

from __future__ import annotations

import inspect
from importlib import import_module
from typing import Any, Final, NamedTuple

from tests.interop.theirs import icechunk

__all__ = ["MODULES", "Difference", "differences", "members", "names"]

MODULES: Final = (
    "config",
    "conflicts",
    "credentials",
    "dask",
    "distributed",
    "ops",
    "repository",
    "session",
    "snapshots",
    "storage",
    "store",
    "types",
    "virtual",
    "xarray",
)
_UNLISTED: Final = ("supported_spec_versions", "upgrade_icechunk_repository")
"""Public functions that the official package has, but not in ``__all__``."""
_OPERATORS: Final = frozenset(
    {"__add__", "__and__", "__call__", "__getitem__", "__int__", "__len__", "__or__"}
)
_FACADE: Final = "icechunk_async.sync"


class Difference(NamedTuple):
    """A name of the official package that is another thing here, or nothing."""

    name: str
    what: str


def names() -> dict[str, list[str]]:
    """Return the public names by module; the package itself is the empty one."""
    found = {"": sorted({*icechunk.__all__, *_UNLISTED})}
    for name in MODULES:
        module = import_module(f"icechunk.{name}")
        public = getattr(module, "__all__", None)
        if public is None:  # a module without a list: what is written there
            own = vars(module).items()
            public = [it for it, value in own if it[0] != "_" and _is_of(value, module.__name__)]
        found[name] = sorted(public)
    return found


def _is_of(value: object, module: str) -> bool:
    return getattr(value, "__module__", None) == module


def members(cls: type) -> list[str]:
    """Return the public members of a class, and the operators that it has.

    A class that is nested in its base has only what is written in it, else it would have itself.
    """
    nested = "." in cls.__qualname__
    inherited = {name for base in (object, Exception) for name in dir(base)}
    found = {
        name
        for name in (vars(cls) if nested else dir(cls))
        if not name.startswith("_") or name in _OPERATORS
    }
    return sorted(found - (inherited - _OPERATORS))


def differences() -> list[Difference]:
    """Compare every public name: whether it is there, its kind, its members and its signature."""
    found: dict[str, str] = {}
    for module, public in names().items():
        path = f".{module}" if module else ""
        theirs = import_module(f"icechunk{path}")
        try:
            ours = import_module(f"{_FACADE}{path}")
        except ModuleNotFoundError:
            found[module] = "there is no such module"
            continue
        for name in public:
            label = f"{module}.{name}" if module else name
            if not hasattr(ours, name):
                found[label] = "is missing"
            elif not module or getattr(theirs, name) is not getattr(icechunk, name, None):
                found |= _compare(label, getattr(theirs, name), getattr(ours, name))
            elif getattr(ours, name) is not getattr(import_module(_FACADE), name, None):
                found[label] = "is not what the package has under the name"
    return [Difference(*item) for item in sorted(found.items())]


def _compare(label: str, theirs: Any, ours: Any) -> dict[str, str]:
    if not inspect.isclass(theirs):
        return _compare_signatures(label, theirs, ours) if inspect.isroutine(theirs) else {}
    if not inspect.isclass(ours):
        return {label: f"is a {type(ours).__name__}, not a class"}
    found = _compare_signatures(label, theirs, ours)
    for name in members(theirs):
        inner = f"{label}.{name}"
        if _has(ours, name):
            found |= _compare_member(inner, _member(theirs, name), _member(ours, name))
        else:
            found[inner] = "is missing"
    return found


def _has(cls: type, name: str) -> bool:
    declared = {field for base in cls.__mro__ for field in vars(base).get("__annotations__", ())}
    return hasattr(cls, name) or name in declared


def _member(cls: type, name: str) -> Any:
    """Return a member of the class without binding it."""
    return inspect.getattr_static(cls, name, None)


def _compare_member(label: str, theirs: Any, ours: Any) -> dict[str, str]:
    if inspect.isclass(theirs):
        return _compare(label, theirs, ours)
    if _is_method(theirs) != _is_method(ours):
        return {label: f"is a {'method' if _is_method(ours) else 'value'} here, and not there"}
    if not _is_method(theirs):
        return {}
    bound = not isinstance(theirs, staticmethod)
    return _compare_signatures(label, _unwrapped(theirs), _unwrapped(ours), bound=bound)


def _unwrapped(value: Any) -> Any:
    return getattr(value, "__func__", value)


def _is_method(value: Any) -> bool:
    return isinstance(value, staticmethod | classmethod) or callable(value)


def _compare_signatures(
    label: str, theirs: Any, ours: Any, *, bound: bool = False
) -> dict[str, str]:
    """Compare names, kinds and defaults of parameters, where the official one tells them."""
    try:
        wanted = _parameters(theirs, bound=bound)
    except (TypeError, ValueError):
        return {}
    found = _parameters(ours, bound=bound)
    if wanted == found:
        return {}
    return {label: f"takes ({', '.join(found)}), not ({', '.join(wanted)})"}


def _parameters(function: Any, *, bound: bool) -> list[str]:
    """Return the parameters as text; those of methods without the first."""
    parameters = list(inspect.signature(function).parameters.values())
    return [_text(it) for it in parameters[int(bound) :]]


def _text(parameter: inspect.Parameter) -> str:
    return f"{_STARS[parameter.kind]}{parameter.name}{_default(parameter.default)}"


_STARS: Final = {
    inspect.Parameter.POSITIONAL_ONLY: "/, ",
    inspect.Parameter.POSITIONAL_OR_KEYWORD: "",
    inspect.Parameter.VAR_POSITIONAL: "*",
    inspect.Parameter.KEYWORD_ONLY: "*, ",
    inspect.Parameter.VAR_KEYWORD: "**",
}


def _default(value: object) -> str:
    if value is inspect.Parameter.empty:
        return ""
    shown = repr(value)
    return "=<object>" if " at 0x" in shown else f"={shown}"
