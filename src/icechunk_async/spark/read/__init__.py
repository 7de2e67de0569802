"""Read groups of arrays and metadata as tables."""
