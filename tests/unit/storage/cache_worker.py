"""A process that reads chunks through a shared cache directory, and says what it found."""

from __future__ import annotations

import asyncio
import random
import sys
from pathlib import Path

from icechunk_async.storage import ByteRange
from tests.unit.storage.cache_tools import cache_of, get, opened

CHUNKS = 60


def body(number: int) -> bytes:
    """Make the bytes of a chunk, one to eight blocks of a disk."""
    return b"%04d" % number * (1000 + number * 119)


async def main(directory: Path, disk_bytes: int, seed: int, reads: int) -> int:
    """Read chunks and parts of them in random order; answer how many came from the disk."""
    choose = random.Random(seed)
    async with opened() as storage:
        for number in range(CHUNKS):
            await storage.put(f"chunks/{number}", body(number))
        cached = cache_of(storage, memory_bytes=0, directory=directory, disk_bytes=disk_bytes)
        for _ in range(reads):
            number = min(choose.randrange(CHUNKS), choose.randrange(CHUNKS))
            key = f"chunks/{number}"
            if choose.random() < 0.3:
                found = await get(cached, key, ByteRange(100, 1000))
                assert found == body(number)[100:1000]
            else:
                assert await get(cached, key) == body(number)
            if choose.random() < 0.02:
                await cached.delete([key])
                await cached.put(key, body(number))
        return cached.statistics.disk_hits


if __name__ == "__main__":
    arguments = [int(argument) for argument in sys.argv[2:]]
    sys.stdout.write(f"{asyncio.run(main(Path(sys.argv[1]), *arguments))}\n")
