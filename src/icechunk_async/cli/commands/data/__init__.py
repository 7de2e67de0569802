"""The contents of snapshots: look at them, query them, bring them in and give them out."""
