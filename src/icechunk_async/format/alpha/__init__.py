"""The layout of the alpha: numbered references and JSON documents.

One module for each JSON schema of the alpha's specification: `references` (with the names of all
files), `snapshots` (with the metadata of arrays), `manifests`.
"""
