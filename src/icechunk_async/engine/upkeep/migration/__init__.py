"""Migration to format version 2, in place: `upgrade` from version 1, `older` from what came before.

A migration that was interrupted is continued by asking for it again.
"""
