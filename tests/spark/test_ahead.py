"""Blocks of a task are read and written while others are computed, within a bound of memory."""

from __future__ import annotations

import threading
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from icechunk_async.spark.write import compute
from icechunk_async.spark.write.compute import AHEAD_BYTES, compute_blocks

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    import numpy.typing as npt

    type Block = npt.NDArray[Any]

LONG = 60
"""Seconds after which a test that waits fails."""


class Store:
    """Reads and writes that can be waited for."""

    def __init__(self, size: int = 10) -> None:
        self.size = size
        self.begun: list[int] = []
        self.written: dict[int, list[float]] = {}
        self.changed = threading.Condition()

    def readers(self, place: int) -> Sequence[Callable[[], Block]]:
        """Return functions for two inputs."""
        return [partial(self.read, place), lambda: np.zeros(0)]

    def read(self, place: int) -> Block:
        """Return a block of this number."""
        with self.changed:
            self.begun.append(place)
            self.changed.notify_all()
        return np.full(self.size, float(place))

    def write(self, place: int, block: Block) -> None:
        """Keep a block."""
        with self.changed:
            self.written[place] = sorted(set(block.tolist()))
            self.changed.notify_all()

    def waits(self, condition: Callable[[], bool]) -> bool:
        """Return whether a condition comes true."""
        with self.changed:
            return self.changed.wait_for(condition, LONG)


def test_next_blocks_are_read_while_one_is_computed() -> None:
    """And the results are those of one after the other, in order."""
    store, order = Store(), []

    def fn(block: Block, _: Block) -> Block:
        place = int(block[0])
        order.append(place)
        # The first block of all says how large blocks are.
        ahead = range(min(place + 1, 20), min(place + 4, 20)) if place else ()
        assert all(store.waits(partial(store.begun.__contains__, it)) for it in ahead)
        return block * 2

    compute_blocks(range(20), store.readers, fn, store.write)
    assert order == list(range(20))
    assert store.written == {place: [2.0 * place] for place in range(20)}


def test_reading_ahead_has_a_bound() -> None:
    """Four blocks, or as many as fit."""
    for size, most in ((10, 4), (AHEAD_BYTES // 16, 2)):
        store = Store(size)

        def fn(block: Block, _: Block, store: Store = store, most: int = most) -> None:
            place = int(block[0])
            with store.changed:
                assert max(store.begun) <= place + most

        compute_blocks(range(12), store.readers, fn, store.write)
        assert sorted(store.begun) == list(range(12))


def test_large_blocks_are_read_one_after_the_other() -> None:
    """As if there were no threads: a task has memory for one."""
    store = Store(AHEAD_BYTES // 8 + 1)

    def fn(block: Block, _: Block) -> Block:
        assert store.begun[-1] == int(block[0])
        assert threading.current_thread() is threading.main_thread()
        return block[:1]

    compute_blocks(range(3), store.readers, fn, store.write)
    assert store.written == {0: [0.0], 1: [1.0], 2: [2.0]}


def test_blocks_are_written_while_the_next_is_computed() -> None:
    """A write that waits does not hold up the computation."""
    store = Store()
    computed: list[int] = []

    def fn(block: Block, _: Block) -> Block:
        with store.changed:
            computed.append(int(block[0]))
            store.changed.notify_all()
        return block

    def write(place: int, block: Block) -> None:
        if place:  # the first is written before there are threads
            assert store.waits(lambda: max(computed) > place or place == 9)
        store.write(place, block)

    compute_blocks(range(10), store.readers, fn, write)
    assert len(store.written) == 10


def test_blocks_that_wait_to_be_written_have_a_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where the first block, which says how large blocks are, is not written."""
    monkeypatch.setattr(compute, "AHEAD_BYTES", 1000)
    store = Store(1)
    computed: list[int] = []

    def fn(block: Block, _: Block) -> Block | None:
        place = int(block[0])
        with store.changed:
            assert place - 1 - len(store.written) <= 2
            computed.append(place)
            store.changed.notify_all()
        return np.full(50, float(place)) if place else None

    def write(place: int, block: Block) -> None:
        with store.changed:  # what would be too many comes at once, or never
            store.changed.wait_for(lambda: max(computed) > place + 2, timeout=0.2)
        store.write(place, block)

    compute_blocks(range(6), store.readers, fn, write)
    assert sorted(store.written) == [1, 2, 3, 4, 5]


def test_a_function_may_return_the_same_memory_for_each_block() -> None:
    """A copy waits to be written."""
    store, kept = Store(), np.zeros(10)
    computed: list[int] = []

    def fn(block: Block, _: Block) -> Block:
        kept[:] = block
        with store.changed:
            computed.append(int(block[0]))
            store.changed.notify_all()
        return kept

    def write(place: int, block: Block) -> None:
        if place == 1:
            assert store.waits(lambda: len(computed) > 3)
        store.write(place, block)

    compute_blocks(range(6), store.readers, fn, write)
    assert store.written == {place: [float(place)] for place in range(6)}


def test_nothing_is_written_where_the_function_returns_nothing() -> None:
    """Such blocks stay unchanged."""
    store = Store()
    compute_blocks(
        range(9), store.readers, lambda block, _: block if block[0] % 2 else None, store.write
    )
    assert sorted(store.written) == [1, 3, 5, 7]


@pytest.mark.parametrize("step", ["read", "compute", "write"])
@pytest.mark.parametrize("place", [0, 1, 7, 9])
def test_the_first_error_ends_it(step: str, place: int) -> None:
    """That of reading, computing or writing; no thread stays."""
    store = Store()

    def fails(name: str, at: int) -> None:
        if name == step and at == place:
            raise ZeroDivisionError(name)

    def read(at: int) -> Block:
        fails("read", at)
        return store.read(at)

    def fn(block: Block) -> Block:
        fails("compute", int(block[0]))
        return block

    def write(at: int, block: Block) -> None:
        fails("write", at)
        store.write(at, block)

    with pytest.raises(ZeroDivisionError, match=step):
        compute_blocks(range(10), lambda at: [partial(read, at)], fn, write)
    assert place not in store.written
    assert not [it for it in threading.enumerate() if it.name.startswith("icechunk-blocks")]


def test_there_may_be_no_blocks_at_all() -> None:
    """A task of a job with fewer chunks than tasks."""
    compute_blocks([], lambda _: [], lambda: None, lambda _, __: None)
