"""The built documentation, on screens."""
