"""Format 2: one object holds refs, ancestry, configuration, status and the operations log."""
