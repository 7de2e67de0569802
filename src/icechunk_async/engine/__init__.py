"""The engine behind repositories and sessions: files, trees, history, commits, upkeep."""
