"""The engine: repositories, sessions, commits, conflicts."""
