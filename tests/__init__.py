"""Tests; the folders mirror the library, or say what the tests are against."""
