"""Manifests that can be searched in pieces, without reading the whole file."""
