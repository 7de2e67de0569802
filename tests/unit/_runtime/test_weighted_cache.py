"""The cache with a budget, also used by several threads."""

from __future__ import annotations

from collections import OrderedDict

from icechunk_async._runtime.weighted_cache import WeightedCache


def test_least_recently_used_value_is_dropped_first() -> None:
    """Reading counts as using."""
    cache = WeightedCache[str, int](10)
    for name, weight in (("a", 4), ("b", 4)):
        cache.put(name, weight, weight)
    assert cache.get("a") == 4
    cache.put("c", 1, 4)
    assert (cache.get("a"), cache.get("b"), cache.get("c")) == (4, None, 1)


def test_value_is_present_while_it_is_replaced() -> None:
    """Readers take no lock, and a miss would cost a request."""
    seen: list[object] = []

    class Watched(OrderedDict[str, tuple[int, int]]):
        def __setitem__(self, key: str, value: tuple[int, int]) -> None:
            seen.append(self.get(key))
            super().__setitem__(key, value)

        def move_to_end(self, key: str, last: bool = True) -> None:  # noqa: FBT001, FBT002
            seen.append(self.get(key))
            super().move_to_end(key, last)

    cache = WeightedCache[str, int](10)
    cache.put("a", 1, 4)
    cache.put("b", 1, 4)
    cache._entries = Watched(cache._entries)
    seen.clear()
    cache.put("a", 2, 6)
    assert seen == [(1, 4), (2, 6)]
    cache.put("c", 3, 4)  # what was replaced counts as used, and at its new weight
    assert (cache.get("a"), cache.get("b"), cache.get("c")) == (2, None, 3)


def test_value_dropped_during_get_is_still_returned() -> None:
    """Readers take no lock, so another thread may be in between."""

    class Dropping(OrderedDict[str, tuple[int, int]]):
        def get(self, key: str, default: object = None) -> object:  # type: ignore[override]
            return self.pop(key, default)

    cache = WeightedCache[str, int](10)
    cache._entries = Dropping()
    cache.put("a", 7, 1)
    assert cache.get("a") == 7
    assert cache.get("a") is None
