"""The layout of the alpha: numbered references and JSON documents.

One module for each JSON schema of the alpha's specification: `references`, `snapshots` (with
`metadata` of arrays), `manifests`. `keys` has the names of their files.
"""
