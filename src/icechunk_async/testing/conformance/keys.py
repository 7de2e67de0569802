"""Promises about keys: which are valid, and which are refused."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import pytest

from icechunk_async.errors import InvalidObjectKeyError
from icechunk_async.storage import MAX_KEY_BYTES, Version
from icechunk_async.testing.conformance._base import Promises, exists, listed, names, read

if TYPE_CHECKING:
    from icechunk_async.storage import Storage

__all__ = ["AWKWARD_KEYS", "KeyPromises"]

AWKWARD_KEYS: Final = (
    # neighbours of the slash, which must sort between them
    *("dir-a", "dir.a", "dir/a", "dir/b/c", "dir/B", "dir0", "dir~", "Dir", "DIR/x"),
    # characters with a meaning in URLs, forms and shells
    *("a b/c d", "a+b", "a%2Fb", "a%", "a%25", "a?b#c", "a&b=c", "a'b\"c", "a\\b", "a:b", "a*b"),
    *("[a]{b}", "~a", "$a", "!a", "a,b;c", "<a>", "a|b", "a^b", "a`b", "@a"),
    # dots and dashes without a meaning here
    *(".a", "..a", "a..", "...", "-", "_", "0"),
    # in UTF-16 the last one would sort before the two in front of it
    *("é/ñ", "日本/語", "\ufb01", "\uffee", "\U0001f600"),
)
"""Keys that a path, a URL or a locale could spoil; all of them can exist side by side."""

_UNACCEPTABLE: Final = (
    *("", "/", "/a", "a/", "a//b", ".", "..", "a/..", "../a", "a/../b", "./a", "a/./b"),
    *("a\0b", "\ud800", "x" * (MAX_KEY_BYTES + 1), "é" * (MAX_KEY_BYTES // 2) + "x"),
)

_VERSION: Final = Version("0")


class KeyPromises(Promises):
    """The promises about valid keys."""

    async def test_awkward_keys_name_different_objects(self, storage: Storage) -> None:
        """Keys are taken literally: each names a different object, and none is altered."""
        for key in AWKWARD_KEYS:
            await storage.put(key, key.encode())
        assert {key: (await read(storage, key)).decode() for key in AWKWARD_KEYS} == {
            key: key for key in AWKWARD_KEYS
        }
        assert set(names(await listed(storage))) == set(AWKWARD_KEYS)

    async def test_a_segment_of_255_bytes_is_a_key(self, storage: Storage) -> None:
        """Segments may be as long as file systems allow names to be."""
        for key in ("s" * 255, "d" * 255 + "/" + "é" * 127):
            await storage.put(key, b"long")
            assert await read(storage, key) == b"long"

    async def test_a_key_of_the_greatest_length_is_a_key(self, storage: Storage) -> None:
        """A key may have ``MAX_KEY_BYTES`` bytes."""
        key = ("d" * 254 + "/") * 4
        key += "k" * (MAX_KEY_BYTES - len(key))
        await storage.put(key, b"long")
        assert await read(storage, key) == b"long"
        assert names(await listed(storage)) == [key]

    async def test_get_refuses_unacceptable_keys(self, storage: Storage) -> None:
        """Reading an invalid key is a mistake in the call, not a missing object."""
        for key in _UNACCEPTABLE:
            with pytest.raises(InvalidObjectKeyError):
                await storage.get(key)

    async def test_get_if_changed_refuses_unacceptable_keys(self, storage: Storage) -> None:
        """Reading an invalid key is a mistake in the call, not a missing object."""
        for key in _UNACCEPTABLE:
            with pytest.raises(InvalidObjectKeyError):
                await storage.get_if_changed(key, _VERSION)

    async def test_put_refuses_unacceptable_keys(self, storage: Storage) -> None:
        """An invalid key is not normalised, and nothing is written."""
        for key in _UNACCEPTABLE:
            with pytest.raises(InvalidObjectKeyError):
                await storage.put(key, b"data")
        assert await listed(storage) == []

    async def test_delete_refuses_unacceptable_keys(self, storage: Storage) -> None:
        """Nothing is deleted if one of the keys is invalid."""
        await storage.put("a", b"data")
        for key in _UNACCEPTABLE:
            with pytest.raises(InvalidObjectKeyError):
                await storage.delete(["a", key])
        assert await exists(storage, "a")

    async def test_copy_refuses_unacceptable_keys(self, storage: Storage) -> None:
        """Source and target must both be keys, and nothing is written otherwise."""
        await storage.put("a", b"data")
        for key in _UNACCEPTABLE:
            with pytest.raises(InvalidObjectKeyError):
                await storage.copy("a", key)
            with pytest.raises(InvalidObjectKeyError):
                await storage.copy(key, "b")
        assert names(await listed(storage)) == ["a"]
