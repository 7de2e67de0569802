"""Format 2 where nothing can be replaced safely: each state of the repo info is a numbered object.

`storage` makes numbered objects look like the one object that format 2 replaces, and `history` is
the way of publishing that uses it. All other files are those of format 2. Other engines find no
repo info, so they cannot take such a repository for one that they may commit to.
"""
