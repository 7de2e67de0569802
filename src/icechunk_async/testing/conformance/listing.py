"""Promises about listing: which keys, in which order, how they are grouped and continued."""

from __future__ import annotations

import asyncio
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Final

from icechunk_async._runtime.concurrency import gather
from icechunk_async.storage import CommonPrefix, ObjectInfo
from icechunk_async.testing.conformance._base import Promises, fill, listed, names, take
from icechunk_async.testing.conformance.keys import AWKWARD_KEYS

if TYPE_CHECKING:
    from icechunk_async.storage import Storage

__all__ = ["ListingPromises", "PagingPromises"]

_CLOCKS_DIFFER_BY: Final = timedelta(days=1)


class ListingPromises(Promises):
    """The promises of ``list_prefix``."""

    async def test_an_empty_storage_lists_nothing(self, storage: Storage) -> None:
        """Without objects every kind of listing is empty."""
        assert await listed(storage) == []
        assert await listed(storage, "folder/") == []
        assert await listed(storage, delimiter="/") == []
        assert await listed(storage, start_after="a") == []

    async def test_a_listing_shows_a_finished_put(self, storage: Storage) -> None:
        """An object is listed as soon as it is written, once, also when it is replaced."""
        for number in range(20):
            await storage.put(f"key-{number:02}", b"x")
            await storage.put("key-00", b"again")
            assert len(await listed(storage)) == number + 1

    async def test_a_listing_leaves_out_deleted_objects(self, storage: Storage) -> None:
        """A deleted object is not listed, nor is its empty group."""
        await fill(storage, ["folder/a", "folder/b"])
        await storage.delete(["folder/a"])
        assert names(await listed(storage)) == ["folder/b"]
        await storage.delete(["folder/b"])
        assert await listed(storage) == []
        assert await listed(storage, delimiter="/") == []

    async def test_a_listing_tells_size_and_time(self, storage: Storage) -> None:
        """Sizes are those of the latest bytes; times are aware, in UTC, and about now."""
        await storage.put("key", b"a first body")
        await storage.put("key", b"12345")
        await storage.put("empty", b"")
        sizes: dict[str, int] = {}
        for entry in await listed(storage):
            assert isinstance(entry, ObjectInfo)
            sizes[entry.key] = entry.size_bytes
            assert entry.last_modified.utcoffset() == timedelta(0)
            assert abs(datetime.now(UTC) - entry.last_modified) < _CLOCKS_DIFFER_BY
        assert sizes == {"key": 5, "empty": 0}

    async def test_keys_are_listed_in_the_order_of_their_bytes(self, storage: Storage) -> None:
        """The order is that of UTF-8 bytes of whole keys: not by folder, locale or UTF-16."""
        await fill(storage, AWKWARD_KEYS)
        expected = sorted(AWKWARD_KEYS, key=lambda key: key.encode())
        assert names(await listed(storage)) == expected

    async def test_many_keys_are_listed_once_and_in_order(self, storage: Storage) -> None:
        """Pages follow each other without a gap or an overlap."""
        # Each number once, out of order, since 7919 is prime: a store that lists by age fails.
        keys = [f"{n % 3}/{n * 7919 % self.many_keys:08}" for n in range(self.many_keys)]
        await fill(storage, keys)
        assert names(await listed(storage)) == sorted(keys)

    async def test_a_prefix_is_a_plain_string(self, storage: Storage) -> None:
        """It may end anywhere, also within a segment, and be a key itself."""
        await fill(storage, ["a", "ab/c", "ab/cd", "ab/d/e", "abc", "b/ab"])
        assert names(await listed(storage, "a")) == ["a", "ab/c", "ab/cd", "ab/d/e", "abc"]
        assert names(await listed(storage, "ab")) == ["ab/c", "ab/cd", "ab/d/e", "abc"]
        assert names(await listed(storage, "ab/")) == ["ab/c", "ab/cd", "ab/d/e"]
        assert names(await listed(storage, "ab/c")) == ["ab/c", "ab/cd"]
        assert names(await listed(storage, "ab/d/e")) == ["ab/d/e"]

    async def test_a_prefix_of_no_key_lists_nothing(self, storage: Storage) -> None:
        """Also where it could not be one, or would be another path to an object."""
        await fill(storage, ["a/b", "c"])
        prefixes = ("b", "a/b/", "a/bc", "c/", "A", "/", "/a", "a//", "a/../", "./", "../", "..")
        # Longer than any key may be, and half a character, which has no UTF-8 form.
        for prefix in (*prefixes, "\0", "a\0", "x" * 2000, "d/" * 1000, "\ud800"):
            assert await listed(storage, prefix) == []
            assert await listed(storage, prefix, delimiter="/") == []

    async def test_a_prefix_is_not_a_pattern(self, storage: Storage) -> None:
        """Characters that mean something to shells and to URLs are taken literally."""
        await fill(storage, ["a*b/c", "axb/c", "a%2Fb", "a/b", "[x]", "x"])
        assert names(await listed(storage, "a*")) == ["a*b/c"]
        assert names(await listed(storage, "a%2F")) == ["a%2Fb"]
        assert names(await listed(storage, "[x]")) == ["[x]"]

    async def test_a_delimiter_groups_what_lies_deeper(self, storage: Storage) -> None:
        """Each group is one entry, in its place in the order of all entries."""
        await fill(storage, ["a-b", "a.b", "a/b", "a/c/d", "a/e", "a0", "b/c", "c"])
        entries = await listed(storage, delimiter="/")
        assert names(entries) == ["a-b", "a.b", "a/", "a0", "b/", "c"]
        assert [type(entry) for entry in entries] == [
            *(ObjectInfo, ObjectInfo, CommonPrefix, ObjectInfo, CommonPrefix, ObjectInfo)
        ]

    async def test_a_delimiter_groups_below_a_prefix(self, storage: Storage) -> None:
        """Only slashes after the prefix count, wherever the prefix ends."""
        await fill(storage, ["a/b", "a/bc/d", "a/bd/e/f", "a/c", "ab/c", "a/bd/g"])
        assert names(await listed(storage, "a/", delimiter="/")) == [
            *("a/b", "a/bc/", "a/bd/", "a/c")
        ]
        assert names(await listed(storage, "a/b", delimiter="/")) == ["a/b", "a/bc/", "a/bd/"]
        assert names(await listed(storage, "a", delimiter="/")) == ["a/", "ab/"]
        assert names(await listed(storage, "a/bd/e", delimiter="/")) == ["a/bd/e/"]
        assert names(await listed(storage, "a/bd/e/", delimiter="/")) == ["a/bd/e/f"]

    async def test_a_group_of_many_keys_is_listed_once(self, storage: Storage) -> None:
        """A group that fills several pages is one entry, and does not hide what follows."""
        await fill(storage, ["a", *(f"group/{n:04}" for n in range(self.page_keys * 5 // 2)), "z"])
        assert names(await listed(storage, delimiter="/")) == ["a", "group/", "z"]

    async def test_keys_that_stay_are_listed_once_while_others_change(
        self, storage: Storage
    ) -> None:
        """Concurrent writes and deletions neither hide nor repeat other objects."""
        stay = [f"{n % 5}/stay-{n:04}" for n in range(self.page_keys * 3 // 2)]
        come = [f"{n % 5}/come-{n:04}" for n in range(200)]
        go = [f"{n % 5}/go-{n:04}" for n in range(200)]
        await fill(storage, stay + go)

        async def change() -> None:
            for key in go:
                await storage.delete([key])
                await asyncio.sleep(0)  # so that both take turns, also where nothing waits
            for key in come:
                await storage.put(key, b"x")
                await asyncio.sleep(0)

        async def watch() -> list[str]:
            found: list[str] = []
            async for entry in storage.list_prefix():
                found += names([entry])
                await asyncio.sleep(0)
            return found

        _, found = await gather(change(), watch())
        assert found == sorted(set(found))
        assert [key for key in found if "stay" in key] == sorted(stay)
        assert set(found) <= {*stay, *come, *go}

    async def test_objects_can_be_deleted_while_they_are_listed(self, storage: Storage) -> None:
        """A caller that deletes each listed object as it comes deletes everything."""
        keys = [f"{n % 5}/{n:04}" for n in range(self.page_keys * 3 // 2)]
        await fill(storage, keys)
        found: list[str] = []
        async for entry in storage.list_prefix():
            found += names([entry])
            # Garbage collection works like this: a page must not be skipped because the one before
            # it shrank.
            await storage.delete(found[-1:])
        assert found == sorted(keys)
        assert await listed(storage) == []

    async def test_listings_can_be_read_side_by_side(self, storage: Storage) -> None:
        """Each listing keeps its own position."""
        keys = [f"key-{n:04}" for n in range(self.page_keys * 6 // 5)]
        await fill(storage, keys)
        one, other = storage.list_prefix(), storage.list_prefix()
        found = await take(one, 10)
        assert names(await take(other, len(keys))) == keys
        found += await take(one, len(keys) - 10)
        assert names(found) == keys

    async def test_a_listing_can_be_left_half_way(self, storage: Storage) -> None:
        """An abandoned listing holds no resources, even in large numbers."""
        keys = [f"key-{n:04}" for n in range(self.page_keys * 6 // 5)]
        await fill(storage, keys)
        before = asyncio.all_tasks()
        for count in range(100):
            entries = storage.list_prefix()
            await take(entries, count % 5 + 1)
            del entries
        for _ in range(10):  # the loop closes what was left within a few turns
            await asyncio.sleep(0)
        assert asyncio.all_tasks() == before
        assert names(await listed(storage)) == keys


class PagingPromises(Promises):
    """The promises of ``start_after``."""

    async def test_a_listing_starts_after_a_key_that_is_there(self, storage: Storage) -> None:
        """That key itself is left out."""
        await fill(storage, ["a", "b/c", "b/d", "e"])
        assert names(await listed(storage, start_after="b/c")) == ["b/d", "e"]
        assert names(await listed(storage, start_after="a")) == ["b/c", "b/d", "e"]
        assert await listed(storage, start_after="e") == []

    async def test_a_listing_starts_after_a_string_that_is_no_key(self, storage: Storage) -> None:
        """Any string will do; what is greater follows."""
        await fill(storage, ["a", "b/c", "b/d", "e"])
        expected = {
            "": ["a", "b/c", "b/d", "e"],
            "a/": ["b/c", "b/d", "e"],
            "b": ["b/c", "b/d", "e"],
            "b/": ["b/c", "b/d", "e"],
            "b/cc": ["b/d", "e"],
            "b/c/x": ["b/d", "e"],
            "b/d0": ["e"],
            "b0": ["e"],
            "zzz": [],
        }
        found = {after: names(await listed(storage, start_after=after)) for after in expected}
        assert found == expected

    async def test_a_listing_starts_after_a_key_within_a_prefix(self, storage: Storage) -> None:
        """Prefix and start both hold, wherever the start lies."""
        await fill(storage, ["a", "b/c", "b/d/e", "b/f", "g"])
        expected = {
            "a": ["b/c", "b/d/e", "b/f"],
            "b/c": ["b/d/e", "b/f"],
            "b/d": ["b/d/e", "b/f"],
            "b/d/e": ["b/f"],
            "b/f": [],
            "c": [],
        }
        found = {after: names(await listed(storage, "b/", start_after=after)) for after in expected}
        assert found == expected

    async def test_a_listing_can_be_continued_after_every_key(self, storage: Storage) -> None:
        """A listing and its continuation are complete together, also for awkward keys."""
        await fill(storage, AWKWARD_KEYS)
        everything = names(await listed(storage))
        for index, key in enumerate(everything):
            assert names(await listed(storage, start_after=key)) == everything[index + 1 :]

    async def test_a_long_listing_can_be_continued(self, storage: Storage) -> None:
        """The continuation may itself have several pages."""
        keys = [f"{n % 4}/{n:05}" for n in range(3000)]
        await fill(storage, keys)
        found: list[str] = []
        # Pages of S3 have a thousand keys: after the first of one, and at the ends of two.
        for count in (1, 999, 1000):
            after = found[-1] if found else None
            found += names(await take(storage.list_prefix(start_after=after), count))
        found += names(await listed(storage, start_after=found[-1]))
        assert found == sorted(keys)

    async def test_groups_that_are_not_greater_are_left_out(self, storage: Storage) -> None:
        """A group is compared like a key: by its own string, not by what is in it."""
        await fill(storage, ["a", "b/c", "b/d", "b0", "e/f"])
        expected = {
            "a": ["b/", "b0", "e/"],
            "b": ["b/", "b0", "e/"],
            "b.": ["b/", "b0", "e/"],
            "b/": ["b0", "e/"],
            "b/c": ["b0", "e/"],
            "b/zzz": ["b0", "e/"],
            "b0": ["e/"],
            "e/": [],
        }
        found = {
            after: names(await listed(storage, start_after=after, delimiter="/"))
            for after in expected
        }
        assert found == expected

    async def test_groups_below_a_prefix_start_after_a_string(self, storage: Storage) -> None:
        """Prefix, start and delimiter hold together."""
        await fill(storage, ["a/b", "a/c/d", "a/c/e", "a/f/g", "h"])
        expected = {
            "a": ["a/b", "a/c/", "a/f/"],
            "a/b": ["a/c/", "a/f/"],
            "a/c/": ["a/f/"],
            "a/c/d": ["a/f/"],
            "a/f/": [],
            "b": [],
        }
        found = {
            after: names(await listed(storage, "a/", start_after=after, delimiter="/"))
            for after in expected
        }
        assert found == expected
