"""Manifests that are searched in pieces."""
