"""The objects of a repository, loaded, cached and stored: snapshots, manifests, logs, chunks."""
