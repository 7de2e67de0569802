"""Tests of what everything else runs on."""
