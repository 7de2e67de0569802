"""Snapshots and refs: read history, change it, review and watch it, and see who writes."""
