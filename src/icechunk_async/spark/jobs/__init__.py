"""Upkeep as Spark jobs, for repositories too large for one process.

Each module does what a method of `Repository` does, divided over tasks: `garbage` collects,
`verify` looks for missing and damaged objects, `manifests` rewrites manifests and adds up the bytes
of chunks, `analyze` makes statistics of their values.
"""
