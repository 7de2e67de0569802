"""Objects in one SQLite file, ``sqlite:///path/to/file.db``; each operation is a transaction."""

import asyncio
import sqlite3
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterable
from contextlib import asynccontextmanager, suppress
from datetime import UTC, datetime
from threading import Lock
from uuid import uuid4

from icechunk_async import errors
from icechunk_async import storage as ic
from icechunk_async.storage import Retrieved, Version, check_key

TABLE = "CREATE TABLE IF NOT EXISTS objects (key BLOB PRIMARY KEY, data, version, modified)"
FIND = "SELECT data, version, modified FROM objects WHERE key = ?"
PAGE = """SELECT CAST(key AS TEXT), length(data), modified FROM objects
    WHERE key >= ? AND key < ? AND key > ? ORDER BY key LIMIT 1000"""
FAILURES: dict[int, type[errors.StorageError]] = {
    sqlite3.SQLITE_BUSY: errors.StorageUnavailableError,
    sqlite3.SQLITE_CANTOPEN: errors.StorageUnavailableError,
    sqlite3.SQLITE_FULL: errors.StorageFullError,
    sqlite3.SQLITE_READONLY: errors.PermissionDeniedError,
}


class SqliteStorage:
    """Keeps every promise of :class:`icechunk_async.storage.Storage`."""

    def __init__(self, url: str) -> None:
        self.description, self.capabilities = ic.StorageDescription(url), ic.Capabilities()
        self._db: sqlite3.Connection | None = None
        self._closed, self._lock = False, Lock()  # held by a thread for one transaction

    async def _run[T](self, work: Callable[[sqlite3.Connection], T]) -> T:
        def transact() -> T:
            with self._lock:
                if self._closed:
                    raise errors.StorageClosedError(f"{self.description.url!r} is closed.")
                try:
                    with self._db or self._connect() as db:  # commits, or rolls back an error
                        db.execute("BEGIN IMMEDIATE")
                        db.execute(TABLE)
                        return work(db)
                except sqlite3.Error as error:
                    code = getattr(error, "sqlite_errorcode", 0) & 0xFF
                    kind = FAILURES.get(code, errors.OutcomeUnknownError)
                    raise kind(f"SQLite, at {self.description.url!r}: {error}.") from error

        return await asyncio.to_thread(transact)

    def _connect(self) -> sqlite3.Connection:
        path = self.description.url.removeprefix("sqlite://")
        db = sqlite3.connect(path, 60, isolation_level=None, check_same_thread=False)
        with suppress(sqlite3.OperationalError):  # faster, and several may try it at once
            db.execute("PRAGMA journal_mode = WAL")
        db.execute("PRAGMA synchronous = FULL")  # a commit survives a power cut
        self._db = db
        return db

    def close(self) -> None:
        with self._lock:
            self._closed = True
            if self._db:
                self._db.close()

    async def get(self, key: str, byte_range: ic.RangeRequest = None) -> Retrieved:
        check_key(key)
        return await self._run(lambda db: read(db, key, byte_range))

    async def get_if_changed(self, key: str, version: Version) -> Retrieved | None:
        found = await self.get(key)
        return None if found.version == version else found

    async def put(self, key: str, data: ic.Data, *, if_version: ic.Expected = None) -> Version:
        check_key(key)
        body = bytes(data)  # the caller may change its buffer while the thread works
        return await self._run(lambda db: write(db, key, body, key, if_version))

    async def copy(self, source: str, target: str, *, if_version: Version | None = None) -> Version:
        check_key(source)
        check_key(target)

        def duplicate(db: sqlite3.Connection) -> Version:
            return write(db, target, bytes(read(db, source).data), source, if_version)

        return await self._run(duplicate)

    async def delete(self, keys: Iterable[str]) -> list[ic.DeleteFailure]:
        doomed = [[check_key(key).encode()] for key in keys]
        await self._run(lambda db: db.executemany("DELETE FROM objects WHERE key = ?", doomed))
        return []  # all are gone, or the transaction failed and was raised

    async def list_prefix(
        self, prefix: str = "", *, start_after: str | None = None, delimiter: str | None = None
    ) -> AsyncIterator[ic.ListEntry]:
        group = start_after or ""
        # The order is that of bytes, and no UTF-8 has the byte 0xff.
        first, after = (text.encode(errors="surrogatepass") for text in (prefix, group))
        bounds = [first, first + b"\xff", after]
        while page := await self._run(lambda db: db.execute(PAGE, bounds).fetchall()):
            for key, size, modified in page:
                cut = key.find("/", len(prefix)) + 1 if delimiter else 0
                if not cut:
                    yield ic.ObjectInfo(key, size, datetime.fromisoformat(modified))
                elif key[:cut] > group:
                    group = key[:cut]
                    yield ic.CommonPrefix(group)
            bounds[2] = page[-1][0].encode()

    async def sync(self) -> None:
        await self._run(lambda db: None)  # what was committed survives a power cut


def read(db: sqlite3.Connection, key: str, byte_range: ic.RangeRequest = None) -> Retrieved:
    row = db.execute(FIND, [key.encode()]).fetchone()
    if row is None:
        raise errors.ObjectNotFoundError(f"There is no object {key!r}.", key=key)
    data, version, modified = row
    start, stop = ic.slice_range(byte_range, len(data))
    return Retrieved(
        data[start:stop], Version(version), len(data), datetime.fromisoformat(modified)
    )


def write(
    db: sqlite3.Connection, key: str, data: bytes, watched: str, expected: ic.Expected
) -> Version:
    row = db.execute(FIND, [watched.encode()]).fetchone()
    state = Version(row[1]) if row else ic.ABSENT
    if expected not in (None, state):
        message = f"{watched!r} is at {state}, not {expected}; nothing changed."
        raise errors.PreconditionFailedError(message, key=watched, expected=expected)
    version, now = uuid4().hex, datetime.now(UTC).isoformat()
    db.execute("REPLACE INTO objects VALUES (?, ?, ?, ?)", [key.encode(), data, version, now])
    return Version(version)


@asynccontextmanager
async def open_sqlite(url: str) -> AsyncGenerator[SqliteStorage]:
    """Open the objects in a file, which the first operation makes."""
    storage = SqliteStorage(url)
    try:
        yield storage
    finally:
        await asyncio.to_thread(storage.close)
