"""The hierarchy of one session: look up, list, read and write nodes and chunks."""
