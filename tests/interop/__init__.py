"""Tests against the official engine."""
