"""A contract for `lint-imports`: no modules import one another, directly or through others.

Imports inside functions and under ``TYPE_CHECKING`` count, as they do for the other contracts: two
modules that need one another's types cannot be read, or changed, one by one either. The contract
`acyclic_siblings` of import-linter compares packages with all that is in them, which is stricter,
and does not see a circle between a package and a module in it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, override

from importlinter import Contract, ContractCheck, output

if TYPE_CHECKING:
    from grimp import ImportGraph

__all__ = ["AcyclicModules", "find_circles"]


def find_circles(graph: ImportGraph) -> list[list[str]]:
    """Return the largest groups of modules that all import one another, in order of their names."""
    circles: list[list[str]] = []
    left = sorted(graph.modules)
    while left:
        module = left[0]
        # All modules that it uses and that use it, directly or through others.
        above, below = graph.find_downstream_modules(module), graph.find_upstream_modules(module)
        circle = {module, *above & below}
        left = [it for it in left if it not in circle]
        if len(circle) > 1:
            circles.append(sorted(circle))
    return circles


class AcyclicModules(Contract):
    """No module of the root packages is in a circle. It has no options, and so no exceptions."""

    type_name = "acyclic_modules"

    @override
    def check(self, graph: ImportGraph, verbose: bool) -> ContractCheck:
        """Look for circles."""
        del verbose
        found = [(circle, _imports(graph, circle)) for circle in find_circles(graph)]
        return ContractCheck(kept=not found, metadata={"circles": found})

    @override
    def render_broken_contract(self, check: ContractCheck) -> None:
        """Print the modules of each circle, and the imports that close it."""
        for circle, imports in check.metadata["circles"]:
            output.print_error(f"{len(circle)} modules import one another: {', '.join(circle)}.")
            output.new_line()
            for line in imports:
                output.print_error(f"- {line}")
            output.new_line()


def _imports(graph: ImportGraph, circle: list[str]) -> list[str]:
    """Return the imports between the modules of a circle, with their lines."""
    found: list[str] = []
    for importer in circle:
        for imported in sorted(graph.find_modules_directly_imported_by(importer) & {*circle}):
            details = graph.get_import_details(importer=importer, imported=imported)
            lines = ", ".join(map(str, sorted({it["line_number"] for it in details})))
            found.append(f"{importer} -> {imported} (line {lines})")
    return found
