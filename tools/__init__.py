"""Tools for maintainers: they check or draw the source and are not packaged."""
