"""The commands, by kind: functions that return documents, and functions that print them.

They use the public library, and of `cli` what all commands share. A module here may use another
one's documents and printing, as `versions` does with those of `history`.
"""
