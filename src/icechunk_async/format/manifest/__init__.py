"""Chunk references as NumPy columns, and the manifest files that hold them."""
