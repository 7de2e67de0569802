"""Objects in one SQLite file, ``sqlite:///path/to/file.db``; each operation is a transaction."""

import sqlite3
from collections.abc import Generator, Iterator, Sequence
from contextlib import closing, contextmanager
from datetime import UTC, datetime
from threading import Lock
from uuid import uuid4

from icechunk_async import errors
from icechunk_async import storage as ic

BEGIN = """PRAGMA journal_mode = PERSIST; PRAGMA synchronous = FULL; BEGIN IMMEDIATE;
    CREATE TABLE IF NOT EXISTS objects (key TEXT PRIMARY KEY, data, version, modified)"""
FIND = "SELECT data, version, modified FROM objects WHERE key = ?"
PAGE = """SELECT key, length(data), modified FROM objects WHERE key > CAST(? AS TEXT)
    AND key BETWEEN CAST(? AS TEXT) AND CAST(? AS TEXT) ORDER BY key LIMIT 1000"""
FAILURES: dict[int, type[errors.StorageError]] = {
    sqlite3.SQLITE_BUSY: errors.StorageUnavailableError,
    sqlite3.SQLITE_CANTOPEN: errors.StorageUnavailableError,
    sqlite3.SQLITE_FULL: errors.StorageFullError,
    sqlite3.SQLITE_READONLY: errors.PermissionDeniedError,
}


class SqliteObjects:
    def __init__(self, url: str) -> None:
        self.url, self.lock = url, Lock()  # threads wait in line; SQLite itself lets them race

    @contextmanager
    def transaction(self) -> Generator[sqlite3.Connection]:
        try:
            path = self.url.removeprefix("sqlite://")
            with (
                self.lock,
                closing(sqlite3.connect(path, 60)) as db,
                db,
            ):  # db commits or rolls back
                db.executescript(BEGIN)
                yield db
        except sqlite3.Error as error:
            code = getattr(error, "sqlite_errorcode", 0) & 0xFF
            kind = FAILURES.get(code, errors.OutcomeUnknownError)
            raise kind(f"SQLite, at {self.url!r}: {error}.") from error

    def get(self, key: str, byte_range: ic.RangeRequest) -> ic.Retrieved:
        with self.transaction() as db:
            for data, version, modified in db.execute(FIND, [key]):
                start, stop = ic.slice_range(byte_range, len(data))
                time = datetime.fromisoformat(modified)
                return ic.Retrieved(data[start:stop], ic.Version(version), len(data), time)
        raise errors.ObjectNotFoundError(f"There is no object {key!r}.", key=key)

    def put(self, key: str, data: bytes, expected: ic.Expected) -> ic.Version:
        with self.transaction() as db:
            row = db.execute(FIND, [key]).fetchone()
            ic.check_expected(key, expected, ic.Version(row[1]) if row else ic.ABSENT)
            version, now = uuid4().hex, datetime.now(UTC).isoformat()
            db.execute("REPLACE INTO objects VALUES (?, ?, ?, ?)", [key, data, version, now])
        return ic.Version(version)

    def delete(self, keys: Sequence[str]) -> list[ic.DeleteFailure]:
        with self.transaction() as db:
            db.executemany("DELETE FROM objects WHERE key = ?", [[key] for key in keys])
        return []  # all are gone, or the transaction failed and was raised

    def list(self, prefix: str, start_after: str) -> Iterator[ic.ObjectInfo]:
        begin, after = (text.encode(errors="surrogatepass") for text in (prefix, start_after))
        while rows := self.page(after, begin, begin + b"\xff"):  # no UTF-8 has this byte
            for key, size, modified in rows:
                yield ic.ObjectInfo(key, size, datetime.fromisoformat(modified))
            after = rows[-1][0].encode()

    def page(self, *bounds: bytes) -> Sequence[tuple[str, int, str]]:
        with self.transaction() as db:
            return db.execute(PAGE, bounds).fetchall()


def open_sqlite(url: str) -> ic.ThreadedStorage:
    return ic.ThreadedStorage(SqliteObjects(url), ic.StorageDescription(url))
