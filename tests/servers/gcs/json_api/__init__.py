"""A server of the Google Cloud Storage JSON API for tests. It is ours, not Google's.

No packaged emulator honours generation preconditions, which commits rely on. This one follows the
public documentation of the API: uploads (media, multipart, resumable), objects (get, media with
ranges, list, patch, delete, copyTo, rewriteTo), buckets, batches, all preconditions, and errors.
Objects are kept in memory, optionally with a journal that survives a restart; each operation is one
atomic step. A part of the XML API, over the same objects, serves clients built on object_store.
What is not known here is refused with 501, never ignored.

``python -m tests.servers.gcs.json_api`` runs it; two independent clients check it in
``tests/servers/gcs/test_json_api.py``.
"""
