"""Tests of single modules; the folders mirror ``src/icechunk_async``."""
