"""The ``icechunk-async`` command."""
