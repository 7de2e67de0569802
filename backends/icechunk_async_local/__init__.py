"""Objects as files below a directory: ``file:///data/repository``.

A key ``a/b`` is the plain file ``b`` in the folder ``a``, so other programs that know the layout
read the same directory. See `open_local` for what is promised, and where.
"""

from icechunk_async_local.storage import LocalStorage, open_local

__all__ = ["LocalStorage", "open_local"]
