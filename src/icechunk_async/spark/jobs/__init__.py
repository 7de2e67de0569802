"""Upkeep as Spark jobs, for repositories too large for one process.

Each module does what a method of `Repository` does, divided over tasks: `garbage` collects, `check`
looks for missing objects, `manifests` rewrites manifests and adds up statistics.
"""
