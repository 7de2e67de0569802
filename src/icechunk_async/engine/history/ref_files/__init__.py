"""Format 1: one small object for each branch or tag; ancestry is in the snapshots themselves."""
