"""Open repositories and sessions that code which blocks can use anywhere.

A handle opens at its first use, also in a process to which it was pickled, or forked. What is asked
runs on the loop of code that blocks. Handles do not know the classes that they are for: a `Source`
says how to open, and whose errors to raise.
"""
