"""Virtual chunks: their containers, references to them, and writing many of these.

`write_virtual_dataset` stands in for ``dataset.vz.to_icechunk`` of VirtualiZarr, which takes only
stores of the official engine.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, cast

from icechunk_async._runtime.blocking.portal import run
from icechunk_async._runtime.dataclasses import dataclass
from icechunk_async.errors import WrongTypeError
from icechunk_async.sync.errors import translated
from icechunk_async.sync.official.containers import VirtualChunkContainer
from icechunk_async.sync.official.display import public

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Mapping
    from datetime import datetime
    from typing import Literal

    from icechunk_async.session import Session as AsyncSession
    from icechunk_async.sync.session import Session

    type Region = Literal["auto"] | Mapping[str, Literal["auto"] | slice]

__all__ = [
    "VirtualChunkContainer",
    "VirtualChunkSpec",
    "write_kerchunk_references",
    "write_virtual_dataset",
]


@public("virtual")
@dataclass(frozen=True)
class VirtualChunkSpec:
    """One virtual chunk: its place in the array, and the place of its bytes.

    Attributes:
        index: the chunk's coordinates in the grid of chunks.
        location: URL of the object, or `vcc://container/path`; `?`, `#` and `%` in the object's
            key are percent-encoded.
        offset: the first byte of the chunk in the object.
        length: bytes of the chunk.
        etag_checksum: reading fails if the object has another ETag.
        last_updated_at_checksum: reading fails if the object was modified after this aware time.

    Raises:
        TypeError: the time has no zone.
    """

    index: list[int]
    location: str
    offset: int
    length: int
    etag_checksum: str | None = None
    last_updated_at_checksum: datetime | None = None

    def __post_init__(self) -> None:
        limit = self.last_updated_at_checksum
        if limit is not None and limit.tzinfo is None:
            raise TypeError(
                "VirtualChunkSpec(last_updated_at_checksum=...) has no time zone. Use an aware "
                "time, such as datetime.now(UTC)."
            )


def write_virtual_dataset(
    session: Session,
    dataset: Any,
    *,
    group: str = "/",
    mode: Literal["w", "w-", "a"] | None = None,
    append_dim: str | None = None,
    region: Region | None = None,
    validate_containers: bool = True,
    last_updated_at: datetime | None = None,
) -> None:
    """Write a dataset or a tree of datasets that VirtualiZarr opened into a session.

    An addition to the official names. Does what ``dataset.vz.to_icechunk`` does with a store of the
    official engine: variables made of references stay where they are, variables that were loaded
    are copied. Nothing is committed.

    Args:
        session: a writable session, or a fork of one; of a store it is ``store.session``.
        dataset: an ``xarray.Dataset`` or ``xarray.DataTree``.
        group: path of the group that it becomes.
        mode: ``"w-"`` refuses a group that exists, ``"w"`` replaces it, ``"a"`` adds to it. None
            stands for ``"w-"``, and with ``append_dim`` or ``region`` for the group that exists.
        append_dim: the dimension along which to append to what the group has.
        region: the part of the existing arrays that it replaces, by whole chunks; as for
            ``xarray.Dataset.to_zarr``. Not for trees.
        validate_containers: refuse locations that no container covers, before anything is written.
        last_updated_at: refuse to read sources that were modified after this; by default after a
            second from now.

    Raises:
        InvalidInputError: no container covers a location, `session` is something else, or
            arguments contradict each other; nothing was written.
        ReadOnlyError: the session only reads.
        MissingDriverError: VirtualiZarr is not installed.
        zarr.errors.ContainsGroupError, ValueError: the group exists, or what is there does not fit.

    An interrupt (Ctrl-C) waits until all is written. Cost: one call in columns for each variable; a
    request for each chunk of what is copied.
    """
    from icechunk_async.zarr.virtual import datasets  # noqa: PLC0415 -- zarr loads slowly

    _write(
        session,
        lambda opened: datasets.write_virtual_dataset(
            opened,
            dataset,
            group=group,
            mode=mode,
            append_dim=append_dim,
            region=region,
            validate_containers=validate_containers,
            last_updated_at=last_updated_at,
        ),
    )


def write_kerchunk_references(
    session: Session,
    references: Mapping[str, Any] | str | bytes,
    *,
    path: str = "/",
    checksum: str | datetime | None = None,
    validate_containers: bool = True,
) -> int:
    """Write a hierarchy that kerchunk described into a session; chunks stay where they are.

    An addition to the official names. Nothing is committed.

    Args:
        session: a writable session, or a fork of one; of a store it is ``store.session``.
        references: version 0 or 1, as a mapping or JSON.
        path: group below which the hierarchy is put; made where it is missing.
        checksum: guards all sources: a time after which none of them was modified, or the ETag
            of the only one.
        validate_containers: refuse locations that no container covers.

    Returns:
        The number of virtual chunks written.

    Raises:
        IcechunkError: as `icechunk_async.virtual.write_kerchunk_references`, before anything was
            changed.

    Cost: a request for each distinct object in a ``[url]``, and one for each inline chunk above
    the inline threshold.
    """
    from icechunk_async.zarr.virtual import kerchunk  # noqa: PLC0415 -- zarr loads slowly

    return _write(
        session,
        lambda opened: kerchunk.write_kerchunk_references(
            opened,
            references,
            path=path,
            checksum=checksum,
            validate_containers=validate_containers,
        ),
    )


def _write[T](session: Session, work: Callable[[AsyncSession], Awaitable[T]]) -> T:
    """Put a question to a session, if it is one."""
    from icechunk_async.sync.session import Session  # noqa: PLC0415 -- values load without it

    if not isinstance(session, Session):  # pyright: ignore[reportUnnecessaryIsInstance]
        with translated():
            raise WrongTypeError(
                f"References are written into a session, and this is {_described(session)}. Give "
                "Repository.writable_session(), or the `session` of a store."
            )
    return run(session.handle.ask(lambda opened: work(cast("AsyncSession", opened))))


def _described(value: object) -> str:
    module, name = type(value).__module__, type(value).__name__
    return f"{module}.{name}" if module.startswith("icechunk") else f"a {name}"
