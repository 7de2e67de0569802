"""``icechunk-async demo``: real climate data goes into a versioned repository."""
