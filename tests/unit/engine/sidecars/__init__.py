"""Tests of sidecars."""
