"""Immutable reads kept in memory and on disk."""
