"""Manifests: references as columns, and their files."""
