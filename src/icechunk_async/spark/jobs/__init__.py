"""Upkeep of a repository as Spark jobs."""
