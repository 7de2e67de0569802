"""``python -m icechunk_async.cli`` is the command ``icechunk-async``."""

from icechunk_async.cli import main

if __name__ == "__main__":
    main()
