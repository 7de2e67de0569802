"""The engine behind repositories and sessions.

`open` puts the parts of a repository together and is the door for everything above. Below it, each
room uses only those listed after it: `commit`, `history` and `leases`, `tree`, `files` and
`virtual`, `sidecars`, `changes`. `upkeep` works on open repositories.
"""
