"""Commits of a branch as a stream, and streams written to arrays exactly once."""
