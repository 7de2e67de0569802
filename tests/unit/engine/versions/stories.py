"""Random changes of a hierarchy, and what a snapshot holds, for tests of versions."""

from __future__ import annotations

import json
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from icechunk_async.errors import SessionStateError
from icechunk_async.format.manifest.chunk import VirtualChunk
from tests.helpers import array_document, group_document, read, write

if TYPE_CHECKING:
    import random
    from collections.abc import Sequence

    from icechunk_async import Repository, Session
    from icechunk_async.session import AnySession

__all__ = ["Story", "contents", "contents_at"]

type Contents = dict[str, bytes]


async def contents(session: AnySession) -> Contents:
    """Return every document and chunk of a session by its key; of virtual chunks the reference."""
    found: Contents = {}
    async for key in session.store.list():
        virtual = await _virtual(session, key)
        value = await read(session, key) if virtual is None else repr(virtual).encode()
        assert value is not None
        found[key] = value
    return found


async def _virtual(session: AnySession, key: str) -> VirtualChunk | None:
    """Return the reference of a chunk whose bytes are nowhere."""
    path, found, place = key.rpartition("/c/")
    if not found:
        return None
    handle = await session.workspace.find_chunk(f"/{path}", (int(place),))
    ref = None if handle is None else handle.ref
    return ref if isinstance(ref, VirtualChunk) else None


async def contents_at(repository: Repository, **ref: Any) -> Contents:
    """Return every document and chunk of a snapshot by its key."""
    return await contents(await repository.readonly_session(**ref))


class Story:
    """Makes random changes below one group, in sessions of one repository."""

    def __init__(
        self,
        chance: random.Random,
        top: str = "",
        *,
        names: str = "abc",
        moves: bool = True,
        virtual: bool = True,
        amends: bool = False,
    ) -> None:
        """Draw changes from ``chance``, of nodes below ``top``.

        With or without moves, virtual chunks whose bytes nobody can read, and amended commits.
        """
        self._moves, self._virtual, self._amends = moves, virtual, amends
        self.chance = chance
        self.top = top
        self.names = names

    async def begin(self, repository: Repository, branch: str = "main") -> None:
        """Commit the groups that changes happen in, and an array."""
        session = await repository.writable_session(branch)
        await write(session, "zarr.json", group_document())
        parents = self.top.strip("/").split("/") if self.top else []
        for at in range(len(parents)):
            await write(session, "/".join([*parents[: at + 1], "zarr.json"]), group_document())
        await self._array(session, self._key("first"))
        await session.commit(f"begin {self.top}")

    async def commit(self, repository: Repository, branch: str = "main", steps: int = 4) -> None:
        """Commit some random changes; now and then a move instead."""
        moves = self._moves and repository.spec_version > 1 and self.chance.random() < 0.15
        if moves and await self._move(repository, branch):
            return
        session = await repository.writable_session(branch)
        for _ in range(self.chance.randint(1, steps)):
            await self._change(session)
        amends = self._amends and repository.spec_version > 1
        if amends and self.chance.random() < 0.2:
            with suppress(SessionStateError):  # into moves nothing can be folded
                await session.amend("amended", allow_empty=True)
                return
        await session.commit("changes", allow_empty=True)

    def _key(self, name: str) -> str:
        return f"{self.top.strip('/')}/{name}".lstrip("/")

    async def _nodes(self, session: AnySession, kind: str) -> list[str]:
        found: list[str] = []
        prefix = self.top.strip("/")
        async for key in session.store.list_prefix(f"{prefix}/" if prefix else ""):
            if key.endswith("/zarr.json"):
                path = key.removesuffix("/zarr.json")
                document = json.loads(await read(session, key) or b"{}")
                if document["node_type"] == kind and path != prefix:
                    found.append(path)
        return found

    async def _change(self, session: Session) -> None:
        kind = self.chance.choices(
            [
                "write",
                "erase",
                "new array",
                "new group",
                "attributes",
                "resize",
                "delete",
                "shift",
                "reindex",
            ],
            [8, 2, 2, 1, 2, 2, 1, 1, 1],
        )[0]
        arrays = await self._nodes(session, "array")
        match kind:
            case "new array":
                await self._array(session, await self._free(session))
            case "new group":
                await self._group(session)
            case "delete":
                nodes = arrays + await self._nodes(session, "group")
                if len(nodes) > 1:
                    await session.store.delete_dir(self.chance.choice(nodes))
            case _ if not arrays:
                return
            case "write" | "erase":
                await self._chunk(session, self.chance.choice(arrays), erase=kind == "erase")
            case "shift":
                await session.shift_array(self.chance.choice(arrays), [self.chance.choice([-1, 1])])
            case "reindex":
                await self._mirror(session, self.chance.choice(arrays))
            case _:
                await self._document(session, self.chance.choice(arrays), resize=kind == "resize")

    async def _free(self, session: AnySession) -> str:
        groups = ["", *await self._nodes(session, "group")]
        parent = self.chance.choice(groups)
        name = self.chance.choice(self.names) + str(self.chance.randint(0, 3))
        return f"{parent}/{name}" if parent else self._key(name)

    async def _group(self, session: Session) -> None:
        path = await self._free(session)
        if await read(session, f"{path}/zarr.json") is None:
            await write(session, f"{path}/zarr.json", group_document(n=self.chance.randint(0, 9)))

    async def _array(self, session: Session, path: str) -> None:
        if await read(session, f"{path}/zarr.json") is not None:
            return
        length = self.chance.randint(2, 8)
        await write(session, f"{path}/zarr.json", array_document((length * 3,), (3,)))
        for at in range(length):
            if self.chance.random() < 0.7:
                await self._write(session, path, at)

    async def _length(self, session: AnySession, path: str) -> int:
        document = json.loads(await read(session, f"{path}/zarr.json") or b"{}")
        return int(document["shape"][0]) // 3

    async def _chunk(self, session: Session, path: str, *, erase: bool) -> None:
        length = await self._length(session, path)
        if not length:
            return
        at = self.chance.randrange(length)
        if erase:
            await session.store.delete(f"{path}/c/{at}")
        else:
            await self._write(session, path, at)

    async def _write(self, session: Session, path: str, at: int) -> None:
        """Write a chunk, into the manifest or as an object."""
        data = bytes(self.chance.randrange(256) for _ in range(3))
        draw = self.chance.random()
        if draw < 0.4:
            await write(session, f"{path}/c/{at}", data)
        elif draw < 0.6 and self._virtual:
            # Few names and places, so that equal references come about: writing one again is no
            # change.
            name, offset = data[0] % 3, data[1] % 4
            virtual = VirtualChunk(f"s3://nowhere/{name}", offset, 3, f"v{data[2] % 3}")
            session.workspace.set_ref(f"/{path}", (at,), virtual)
        else:
            # As an object although it is small, and at times twice as long, so that kinds and
            # lengths change.
            ref = await session.workspace.store_object(data * (1 if draw < 0.9 else 2))
            session.workspace.set_ref(f"/{path}", (at,), ref)

    async def _mirror(self, session: Session, path: str) -> None:
        """Put the last chunk first, and so on."""
        last = await self._length(session, path) - 1

        def place(coords: Sequence[int]) -> list[int]:
            return [last - coords[0]]

        await session.reindex_array(path, place, place)

    async def _document(self, session: Session, path: str, *, resize: bool) -> None:
        document = json.loads(await read(session, f"{path}/zarr.json") or b"{}")
        if resize:
            document["shape"] = [3 * self.chance.randint(0, 9)]
        else:
            document["attributes"] = {"n": self.chance.randint(0, 99)}
        await write(session, f"{path}/zarr.json", json.dumps(document).encode())

    async def _move(self, repository: Repository, branch: str) -> bool:
        session = await repository.rearrange_session(branch)
        nodes = await self._nodes(session, "array") + await self._nodes(session, "group")
        if not nodes:
            return False
        source = self.chance.choice(nodes)
        groups = [self.top.strip("/"), *await self._nodes(session, "group")]
        target = f"/{self.chance.choice(groups)}/m{self.chance.randint(0, 999)}".replace("//", "/")
        # A group cannot move into itself.
        if target.startswith(f"/{source}/"):
            return False
        await session.move(f"/{source}", target)
        await session.commit(f"move {source}")
        return True
