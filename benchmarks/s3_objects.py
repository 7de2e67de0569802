"""As much of S3 as the contenders ask for, over a dictionary; no signature is looked at."""

from __future__ import annotations

import itertools
import re
import time
from bisect import bisect_left, bisect_right
from collections import Counter
from dataclasses import dataclass
from datetime import UTC, datetime
from email.utils import formatdate
from typing import TYPE_CHECKING, Final
from urllib.parse import parse_qs, unquote
from xml.sax.saxutils import escape, unescape

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = ["Objects", "Reply"]

_RANGE: Final = re.compile(r"bytes=(\d*)-(\d*)")
_KEY: Final = re.compile(rb"<Key>(.*?)</Key>", re.DOTALL)
_OPEN: Final = '<?xml version="1.0" encoding="UTF-8"?>'


@dataclass(frozen=True, slots=True)
class Reply:
    """The reply to a request."""

    status: str
    body: bytes | memoryview = b""
    headers: str = ""
    """Each ends in a line feed."""


@dataclass(frozen=True, slots=True)
class _Object:
    data: bytes
    etag: str
    meta: str
    when: float


_MISSING: Final = Reply("404 Not Found", b"<Error><Code>NoSuchKey</Code></Error>")
_REFUSED: Final = Reply(
    "412 Precondition Failed", b"<Error><Code>PreconditionFailed</Code></Error>"
)


class Objects:
    """The objects of all buckets, by path; one event loop, so each request is one step."""

    def __init__(self) -> None:
        """Begin with none."""
        self._objects: dict[str, _Object] = {}
        self._paths: list[str] = []  # sorted
        self._parts: dict[str, dict[int, bytes]] = {}
        self._numbers = itertools.count(1)
        self.counts: Counter[str] = Counter()

    def answer(self, method: str, target: str, headers: Mapping[str, str], body: bytes) -> Reply:
        """Carry out a request and return the reply."""
        path, _, query = target.partition("?")
        path = unquote(path)[1:]
        asked = {
            name: values[0] for name, values in parse_qs(query, keep_blank_values=True).items()
        }
        match method:
            case "GET" if path.partition("/")[2] == "":
                self.counts["list"] += 1
                return self._list(path.rstrip("/"), asked)
            case "GET" | "HEAD":
                self.counts[method.lower()] += 1
                return self._read(path, headers, with_body=method == "GET")
            case "PUT" if "partNumber" in asked:
                self.counts["put part"] += 1
                self._parts[asked["uploadId"]][int(asked["partNumber"])] = body
                return Reply("200 OK", headers=f'ETag: "{asked["partNumber"]}"\r\n')
            case "PUT" if "x-amz-copy-source" in headers:
                self.counts["copy"] += 1
                return self._copy(path, headers)
            case "PUT":
                self.counts["put"] += 1
                return self._write(path, headers, body)
            case "DELETE":
                self.counts["delete"] += 1
                self._remove(path)
                return Reply("204 No Content")
            case "POST":
                self.counts["post"] += 1
                return self._post(path, headers, asked, body)
            case _:
                return Reply("405 Method Not Allowed")

    def _read(self, path: str, headers: Mapping[str, str], *, with_body: bool) -> Reply:
        found = self._objects.get(path)
        if found is None:
            return _MISSING if with_body else Reply("404 Not Found")
        told = f"ETag: {found.etag}\r\nAccept-Ranges: bytes\r\n{found.meta}"
        told += f"Last-Modified: {formatdate(found.when, usegmt=True)}\r\n"
        if _is(headers.get("if-none-match"), found):
            return Reply("304 Not Modified", headers=told)
        if "if-match" in headers and not _is(headers["if-match"], found):
            return _REFUSED
        size = len(found.data)
        wanted = _RANGE.fullmatch(headers.get("range", ""))
        if wanted is None or not with_body:
            if not with_body:
                return Reply("200 OK", headers=f"{told}X-Length: {size}\r\n")
            return Reply("200 OK", found.data, told)
        first, last = wanted.groups()
        start = int(first) if first else max(0, size - int(last))
        stop = min(size, int(last) + 1) if first and last else size
        if start >= size:
            return Reply("416 Range Not Satisfiable", headers=f"Content-Range: bytes */{size}\r\n")
        told += f"Content-Range: bytes {start}-{stop - 1}/{size}\r\n"
        return Reply("206 Partial Content", memoryview(found.data)[start:stop], told)

    def _allows(self, path: str, headers: Mapping[str, str]) -> Reply | None:
        found = self._objects.get(path)
        if headers.get("if-none-match") == "*" and found is not None:
            return _REFUSED
        if "if-match" in headers:
            if found is None:
                return _MISSING
            if not _is(headers["if-match"], found):
                return _REFUSED
        return None

    def _write(self, path: str, headers: Mapping[str, str], body: bytes) -> Reply:
        refused = self._allows(path, headers)
        if refused is not None:
            return refused
        meta = "".join(
            f"{name}: {value}\r\n"
            for name, value in headers.items()
            if name.startswith("x-amz-meta-")
        )
        return Reply("200 OK", headers=f"ETag: {self._store(path, body, meta)}\r\n")

    def _store(self, path: str, data: bytes, meta: str) -> str:
        # A number and no MD5, which would make the server the slowest part; as long as one, for
        # clients that look.
        etag = f'"{next(self._numbers):032x}"'
        if path not in self._objects:
            # Sorted when somebody lists.
            self._paths.append(path)
        self._objects[path] = _Object(data, etag, meta, time.time())
        return etag

    def forget_large(self) -> None:
        """Delete objects of a megabyte and more."""
        for path in [path for path, it in self._objects.items() if len(it.data) >= 1 << 20]:
            self._remove(path)

    def _remove(self, path: str) -> None:
        if self._objects.pop(path, None) is not None:
            self._paths = list(self._objects)

    def _copy(self, path: str, headers: Mapping[str, str]) -> Reply:
        source = self._objects.get(unquote(headers["x-amz-copy-source"]).lstrip("/"))
        if source is None:
            return _MISSING
        wanted = headers.get("x-amz-copy-source-if-match", source.etag)
        if not _is(wanted, source):
            return _REFUSED
        etag = escape(self._store(path, source.data, source.meta))
        body = f"{_OPEN}<CopyObjectResult><ETag>{etag}</ETag></CopyObjectResult>"
        return Reply("200 OK", body.encode())

    def _post(
        self, path: str, headers: Mapping[str, str], asked: Mapping[str, str], body: bytes
    ) -> Reply:
        if "delete" in asked:
            bucket = path.rstrip("/")
            keys = [unescape(key.decode(), {"&quot;": '"'}) for key in _KEY.findall(body)]
            for key in keys:
                self._objects.pop(f"{bucket}/{key}", None)
            self._paths = list(self._objects)
            gone = "".join(f"<Deleted><Key>{escape(key)}</Key></Deleted>" for key in keys)
            return Reply("200 OK", f"{_OPEN}<DeleteResult>{gone}</DeleteResult>".encode())
        bucket, _, key = path.partition("/")
        name = f"<Bucket>{bucket}</Bucket><Key>{escape(key)}</Key>"
        if "uploads" in asked:
            upload = f"upload{next(self._numbers)}"
            self._parts[upload] = {}
            kind = "InitiateMultipartUploadResult"
            inner = f"{name}<UploadId>{upload}</UploadId>"
            return Reply("200 OK", f"{_OPEN}<{kind}>{inner}</{kind}>".encode())
        refused = self._allows(path, headers)
        if refused is not None:
            return refused
        parts = self._parts.pop(asked["uploadId"])
        etag = escape(self._store(path, b"".join(parts[n] for n in sorted(parts)), ""))
        kind = "CompleteMultipartUploadResult"
        return Reply("200 OK", f"{_OPEN}<{kind}>{name}<ETag>{etag}</ETag></{kind}>".encode())

    def _list(self, bucket: str, asked: Mapping[str, str]) -> Reply:
        self._paths.sort()
        prefix, delimiter = asked.get("prefix", ""), asked.get("delimiter", "")
        after = asked.get("continuation-token") or asked.get("start-after", "")
        begin = bucket + "/" + prefix
        where = max(
            bisect_left(self._paths, begin),
            bisect_right(self._paths, f"{bucket}/{after}") if after else 0,
        )
        limit = min(int(asked.get("max-keys", "1000")), 1000)
        entries: list[str] = []
        folders: dict[str, None] = {}
        last = ""
        while where < len(self._paths) and self._paths[where].startswith(begin):
            if len(entries) + len(folders) == limit:
                break
            path = self._paths[where]
            last = key = path[len(bucket) + 1 :]
            rest = key[len(prefix) :]
            if delimiter and delimiter in rest:
                folder = prefix + rest.partition(delimiter)[0] + delimiter
                folders[folder] = None
                # Behind all keys of the folder: the search goes on after it, and so does the next
                # page.
                last = folder + "\U0010ffff"
                where = bisect_left(self._paths, f"{bucket}/{last}")
                continue
            found = self._objects[path]
            entries.append(
                f"<Contents><Key>{escape(key)}</Key><LastModified>"
                f"{datetime.fromtimestamp(found.when, UTC):%Y-%m-%dT%H:%M:%S.000Z}</LastModified>"
                f"<ETag>{escape(found.etag)}</ETag><Size>{len(found.data)}</Size>"
                "<StorageClass>STANDARD</StorageClass></Contents>"
            )
            where += 1
        more = where < len(self._paths) and self._paths[where].startswith(begin)
        token = f"<NextContinuationToken>{escape(last)}</NextContinuationToken>" if more else ""
        common = "".join(
            f"<CommonPrefixes><Prefix>{escape(it)}</Prefix></CommonPrefixes>" for it in folders
        )
        body = (
            f"{_OPEN}<ListBucketResult><Name>{bucket}</Name><Prefix>{escape(prefix)}</Prefix>"
            f"<KeyCount>{len(entries) + len(folders)}</KeyCount><MaxKeys>{limit}</MaxKeys>"
            f"<IsTruncated>{'true' if more else 'false'}</IsTruncated>{token}"
            f"{''.join(entries)}{common}</ListBucketResult>"
        )
        return Reply("200 OK", body.encode())


def _is(etag: str | None, found: _Object) -> bool:
    """Return whether an object is at a version; some clients leave the quotes out."""
    return etag is not None and etag.strip('"') == found.etag.strip('"')
