"""A cache of immutable objects: `cached` wraps a storage, `disk` and `disk_space` are on disk."""
