"""A cache of immutable objects: `cached` is the wrapper, `disk` and `disk_space` its disk tier."""
