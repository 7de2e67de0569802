"""Leave out conversions of the command line that convert nothing.

Typer since 0.29 has Pydantic convert every value, also text to text and None to None, and to import
Pydantic takes longer than to import all the rest of Typer. Most of our parameters are text.
"""

from __future__ import annotations

import inspect
from typing import TYPE_CHECKING, Annotated, Any, get_args, get_origin

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

__all__ = ["convert_only_what_differs", "shortened"]


def convert_only_what_differs(command: Any) -> None:
    """Pass on what is of the declared type already, and what was not given.

    Everything else remains Typer's affair, with its messages: also what is required and missing.

    Args:
        command: of Click, made by Typer from a function whose annotations are types, as
            `declaring` makes them; what is below it changes as well.
    """
    for below in getattr(command, "commands", {}).values():
        convert_only_what_differs(below)
    get_params = command.get_params

    def get_shortened(context: Any) -> list[Any]:
        return shortened(command, get_params(context))

    # Options such as --help are added when parameters are asked for.
    command.get_params = get_shortened


def shortened(command: Any, parameters: list[Any]) -> list[Any]:
    """Return the parameters of one command, which convert what `convert_only_what_differs` says."""
    declared: Mapping[str, inspect.Parameter] = {}
    if command.callback is not None:
        declared = inspect.signature(command.callback).parameters
    for parameter in parameters:
        # Asked for by help, completion and parsing in turn; each time it would be wrapped once
        # more.
        if "process_value" in vars(parameter):
            continue  # it was asked for before
        kinds: frozenset[object] = frozenset()
        if parameter.name in declared:
            kinds = _kinds_of(declared[parameter.name].annotation)
        parameter.process_value = _shortened(parameter, kinds)
    return parameters


def _kinds_of(annotation: Any) -> frozenset[object]:
    """Return the types of values that are as declared: those in ``Annotated[str | None, ...]``."""
    if get_origin(annotation) is not Annotated:
        return frozenset()
    declared, *notes = get_args(annotation)
    # A parser makes another type of a text, also of one that is of the declared type already.
    if any(getattr(it, "parser", None) is not None for it in notes):
        return frozenset()
    return frozenset(get_args(declared) or [declared])


def _shortened(parameter: Any, kinds: frozenset[object]) -> Callable[[Any, Any], Any]:
    """Return a method in place of ``Parameter.process_value`` of Click."""
    process = parameter.process_value
    is_list = parameter.multiple or parameter.nargs == -1

    def process_value(context: Any, value: Any) -> Any:
        if value is None and not parameter.required:
            value = () if is_list else None
        # The exact type: True is an int to `isinstance`, and a default may be of a subclass.
        elif is_list or type(value) not in kinds:
            return process(context, value)
        # Click calls it at the end of `process_value`, which is left out here.
        if parameter.callback is not None:
            value = parameter.callback(context, parameter, value)
        return value

    return process_value
