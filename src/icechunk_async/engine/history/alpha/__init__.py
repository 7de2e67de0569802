"""The alpha: a branch is a sequence of numbered files, each created if absent.

`layout` names and encodes all other files, which are JSON documents.
"""
