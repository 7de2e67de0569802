"""Proposals: changes that are checked and reviewed before a branch takes them.

`record` is a proposal as a value and as JSON, `files` keeps records in the storage, each under a
new name, `checks` runs checks, and `page` shows a proposal as a static HTML page.
`icechunk_async.proposals` makes and accepts them.
"""
