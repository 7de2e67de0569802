"""Virtual chunks: bytes in objects that do not belong to the repository.

`chunks` checks locations against the repository's containers and reads from those that the reader
authorised; `sources` turns a container and a credential into the options of a backend.
"""
