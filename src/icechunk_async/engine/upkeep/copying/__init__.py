"""Copying repositories: whole or in part, once or again and again.

`contents` lists what a copy carries, `selection` decides which part of a history it holds, `plan`
the state that it is to show, `needs` finds the objects of new snapshots, `transfer` moves objects,
`marks` tells a copy from a repository that is worked with, and `copy` puts the steps in order.
Copies of some nodes, or without chunks, have other snapshots: `derivation` says which, and
`deriving` makes them.
"""
