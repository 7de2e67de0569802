"""Spec 2: one repo info object holds refs, ancestry, configuration and the operations log."""
