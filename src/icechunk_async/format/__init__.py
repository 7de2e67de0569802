"""Bytes to values and back, for every file of the Icechunk format; pure, no I/O."""
