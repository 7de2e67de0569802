"""The shipped tools for testing."""
