"""Filters of tiles, undone: `pipeline` describes them, and the others decode a kind each."""
