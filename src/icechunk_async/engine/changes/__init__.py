"""The changes of a session as pure values, without I/O, event loop or storage.

`change_set.ChangeSet` is what a session changed, and `change_set.WorkingTree` the hierarchy that it
sees. `detect` finds conflicts with a newer commit, `merge` joins the changes of forks, `wire` turns
them into bytes, `moves` renames subtrees, and `splitting` decides which manifests a commit writes.
"""
