"""One measurement in a process: ``python -m benchmarks.child module:function ARGUMENTS``.

Peak memory belongs to a process, and so does what an import costs; and what one contender leaves
behind (threads, caches, allocator arenas) is no other's burden.
"""

from __future__ import annotations

import json
import os
import sys
from importlib import import_module

os.environ.setdefault("ICECHUNK_NO_LOGS", "1")


def main(function: str, arguments: str) -> None:
    """Print the figures that a function returns, as JSON."""
    module, _, name = function.partition(":")
    figures = getattr(import_module(module), name)(**json.loads(arguments))
    sys.stdout.write(json.dumps(figures) + "\n")
    sys.stdout.flush()
    # The official engine may crash while the interpreter ends, after all is said.
    os._exit(0)


if __name__ == "__main__":
    main(*sys.argv[1:])
