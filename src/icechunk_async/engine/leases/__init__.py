"""Leases: sessions that garbage collection spares, and that outlive their process.

`record` is a lease as bytes, `keeper` holds one for a session, and `register` lists those of a
repository. All times are the storage's: an object's time of modification is when it was renewed.
"""
