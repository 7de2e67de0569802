"""Tests on a real local Spark."""
