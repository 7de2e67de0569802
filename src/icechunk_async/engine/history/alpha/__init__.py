"""The alpha: a branch is a sequence of numbered files, each created if absent."""
