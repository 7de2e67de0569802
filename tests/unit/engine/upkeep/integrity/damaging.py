"""Healthy histories of every shape, and ways to damage one object of them."""

from __future__ import annotations

import random
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

import numpy as np
import zarr.api.asynchronous as za
from zarr.codecs import BytesCodec, Crc32cCodec, ZstdCodec

from icechunk_async import Repository, RepositoryConfig
from icechunk_async.engine.files.packing import Packing
from icechunk_async.errors import IcechunkError
from icechunk_async.format.config.codec import decode_config
from icechunk_async.format.envelope import FileType, unpack
from icechunk_async.format.manifest.reading import decode_manifest
from icechunk_async.format.refs import decode_ref
from icechunk_async.format.repo_info import decode_repo_info
from icechunk_async.format.snapshot import decode_snapshot
from icechunk_async.format.transaction_log import decode_transaction_log
from icechunk_async.storage import open_storage
from tests.helpers import memory_url, objects

if TYPE_CHECKING:
    from icechunk_async.session import Session

__all__ = ["LEVELS", "MODES", "Damage", "damage", "filled", "healthy", "kinds_of", "promise"]

MODES = ("deleted", "truncated", "flipped", "swapped")
_KINDS = ("repo", "refs", "config.yaml", "snapshots", "transactions", "manifests", "chunks")
LEVELS = ("structure", "existence", "length", "sums", "decode")


async def healthy(seed: int, spec: int, *, expires: bool = True) -> dict[str, bytes]:
    """Return the objects of a repository with branches, tags, packs, and chunks inside manifests.

    The codecs of its arrays add checksums to chunks.
    """
    dice = random.Random(seed)
    url = memory_url()
    # Half of all histories: in objects that chunks share, damage may hit bytes of none.
    packing = Packing(2000, 900) if seed % 2 else None
    config = RepositoryConfig(inline_chunk_threshold_bytes=80)
    create = Repository.create(url, spec_version=spec, packing=packing, config=config)
    async with create as repository, open_storage(url) as storage:
        session = await repository.writable_session("main")
        group = await za.create_group(store=session.store, attributes={"seed": seed})
        for name, size in (("a", 600), ("b", 40), ("c", 250)):
            await group.create_array(
                name,
                shape=(6 * size,),
                chunks=(size,),
                dtype="uint8",
                fill_value=255,
                serializer=BytesCodec(),
                compressors=[ZstdCodec(), Crc32cCodec()] if name == "c" else [Crc32cCodec()],
            )
            await _write(session, name, dice)
        await session.commit("arrays")
        await repository.create_branch("side", await repository.lookup_branch("main"))
        for number in range(4):
            branch = dice.choice(["main", "side"])
            session = await repository.writable_session(branch)
            await _write(session, dice.choice("abc"), dice)
            if number == 2:
                await (await za.open_array(store=session.store, path="a")).resize((5 * 600,))
            await session.commit(f"change {number}", metadata={"number": number})
        await repository.create_tag("kept", await repository.lookup_branch("side"))
        if spec == 2:
            moving = await repository.rearrange_session("main")
            await moving.move("/b", "/d")
            await moving.commit("moved")
            for method in ("commit", "amend"):
                session = await repository.writable_session("main")
                await _write(session, "c", dice)
                await getattr(session, method)(method)
        if expires and dice.random() < 0.5:
            await repository.expire_snapshots(datetime.now(UTC))
            await repository.garbage_collect(datetime.now(UTC))
        return await objects(storage)


async def _write(session: Session, name: str, dice: random.Random) -> None:
    array = await za.open_array(store=session.store, path=name)
    size = array.chunks[0]
    for chunk in dice.sample(range(array.shape[0] // size), 3):
        # Never 255, the fill value: a chunk of fill values would not be stored.
        values = [dice.randrange(255) for _ in range(size)]
        await array.setitem(slice(chunk * size, (chunk + 1) * size), np.array(values, "uint8"))


async def filled(found: dict[str, bytes]) -> str:
    """Return the URL of a storage with these objects."""
    url = memory_url()
    async with open_storage(url) as storage:
        for key, data in found.items():
            await storage.put(key, data)
    return url


def kinds_of(found: dict[str, bytes]) -> dict[str, list[str]]:
    """Return the keys of each kind of object."""
    kinds: dict[str, list[str]] = {}
    for key in sorted(found):
        folder = key.partition("/")[0]
        if folder not in _KINDS or key.endswith(".deleted"):
            continue
        kinds.setdefault(folder, []).append(key)
    return kinds


@dataclass(frozen=True)
class Damage:
    """One object, and how it was damaged."""

    key: str
    mode: str
    objects: dict[str, bytes]


def damage(found: dict[str, bytes], key: str, mode: str, dice: random.Random) -> Damage:
    """Damage one object."""
    damaged = dict(found)
    data = found[key]
    match mode:
        case "deleted":
            del damaged[key]
        case "truncated":
            damaged[key] = data[: dice.randrange(len(data))]
        case "flipped":
            at = dice.randrange(len(data))
            damaged[key] = bytes([*data[:at], data[at] ^ 1 << dice.randrange(8), *data[at + 1 :]])
        case _:
            folder = key.partition("/")[0]
            others = [it for it in kinds_of(found)[folder] if it != key]
            damaged[key] = found[dice.choice(others)] if others else data
    return Damage(key, mode, damaged)


def _decoded(key: str, data: bytes) -> Any:
    match key.partition("/")[0]:
        case "repo":
            info = decode_repo_info(unpack(data, FileType.REPO_INFO))
            return repr(info), repr(info.metadata), repr(info.snapshots)
        case "snapshots":
            it = decode_snapshot(unpack(data, FileType.SNAPSHOT))
            nodes = [(repr(node), node.user_data) for node in it.nodes.values()]
            return repr(it), repr(it.manifests), nodes
        case "transactions":
            return repr(decode_transaction_log(unpack(data, FileType.TRANSACTION_LOG).payload))
        case "manifests":
            manifest = decode_manifest(unpack(data, FileType.MANIFEST).payload)
            rows = [
                (repr(node), refs.coords.tolist(), [repr(refs.ref(it)) for it in range(len(refs))])
                for node, refs in manifest.arrays.items()
            ]
            inline = [
                [bytes(refs.inline[:])] if len(refs.inline) else []
                for refs in manifest.arrays.values()
            ]
            return repr(manifest.id), rows, inline
        case "refs":
            return decode_ref(data)
        case _:
            return repr(decode_config(data, 1))


def promise(
    found: dict[str, bytes], made: Damage, ranges: dict[str, list[tuple[int, int]]]
) -> str | None:
    """Return the level that promises to find a damage; None if none does.

    ``ranges`` has the first byte of each chunk in each chunk object, and the byte after its last.

    A file of the format that still can be decoded, to something else, is promised only where it
    is another file: the format has no checksums for these.
    """
    key, data = made.key, made.objects.get(made.key)
    folder = key.partition("/")[0]
    if data == found[key]:
        return None
    if folder == "chunks":
        if data is None:
            return "existence"
        if any(stop > len(data) for _, stop in ranges[key]):
            return "length"
        # Of a longer or shorter object, only the bytes that both have.
        changed = {at for at, (a, b) in enumerate(zip(data, found[key], strict=False)) if a != b}
        in_use = any(start <= at < stop for at in changed for start, stop in ranges[key])
        return "decode" if in_use and made.mode == "flipped" else None
    # Both are whole documents: another branch's tip, or no configuration, is a valid state.
    if folder in ("refs", "config.yaml") and made.mode in ("deleted", "swapped"):
        return "structure" if key.endswith("branch.main/ref.json") and data is None else None
    if data is None or (made.mode == "swapped" and folder != "repo"):
        return "structure"
    try:
        _decoded(key, data)
    except IcechunkError:
        return "structure"
    return None
