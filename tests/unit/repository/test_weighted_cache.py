"""The cache with a budget, also used by several threads."""

from __future__ import annotations

from collections import OrderedDict

from icechunk_async.repository.cache import WeightedCache


def test_the_least_recently_used_leaves_first() -> None:
    """Reading counts as using."""
    cache = WeightedCache[str, int](10)
    for name, weight in (("a", 4), ("b", 4)):
        cache.put(name, weight, weight)
    assert cache.get("a") == 4
    cache.put("c", 1, 4)
    assert (cache.get("a"), cache.get("b"), cache.get("c")) == (4, None, 1)


def test_what_is_dropped_while_it_is_read_is_answered_all_the_same() -> None:
    """Readers take no lock, so another thread may be in between."""

    class Dropping(OrderedDict[str, tuple[int, int]]):
        def get(self, key: str, default: object = None) -> object:  # type: ignore[override]
            return self.pop(key, default)

    cache = WeightedCache[str, int](10)
    cache._entries = Dropping()
    cache.put("a", 7, 1)
    assert cache.get("a") == 7
    assert cache.get("a") is None
