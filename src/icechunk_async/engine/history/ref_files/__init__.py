"""Spec 1: one small object a branch or tag; ancestry is in the snapshots themselves."""
