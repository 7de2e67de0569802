"""Optional files beside manifests and snapshots: checksums, digests and statistics.

The format does not know them, and the official engine ignores them. A sidecar that is missing,
damaged or old makes what it says unknown: it never changes an answer. `files` opens them, when they
are used first.
"""
