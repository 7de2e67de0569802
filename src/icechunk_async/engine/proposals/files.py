"""Proposals in the storage: each state of one is a new object, and none is ever replaced.

The object with the highest number is the present state. A writer creates the next number, so of two
writers one is first, on every storage that can create objects safely; what happened to a
proposal can be read afterwards.
"""

from __future__ import annotations

import logging
import re
from dataclasses import replace
from typing import TYPE_CHECKING, Final

from icechunk_async._runtime import clock
from icechunk_async._runtime.concurrency import bounded_map, closing
from icechunk_async.engine.history.outcomes import create_object
from icechunk_async.engine.proposals.record import check_size, decode_record, encode_record
from icechunk_async.errors import (
    FormatError,
    InvalidInputError,
    ObjectNotFoundError,
    ProposalNotFoundError,
    ProposalStateError,
)
from icechunk_async.format.ids import ProposalId
from icechunk_async.format.layout import PROPOSALS, proposal_prefix
from icechunk_async.storage import ObjectInfo

if TYPE_CHECKING:
    from collections.abc import Iterable
    from typing import Any

    from icechunk_async.engine.proposals.record import ProposalRecord
    from icechunk_async.format.ids import SnapshotId
    from icechunk_async.storage import Storage

__all__ = [
    "PAGE",
    "append",
    "as_proposal_id",
    "create",
    "load",
    "load_all",
    "newest_numbers",
    "pinned",
    "put_page",
    "record_key",
]

_log = logging.getLogger(__name__)

PAGE: Final = "review.html"
# Exactly six digits: `000001` and `1` would be two objects of one state.
_KEY: Final = re.compile(r"proposals/(?P<id>[0-9A-Z]{20})/(?P<number>\d{6})\.json")
_AT_ONCE: Final = 16
_SERIAL_BYTES: Final = 8
_LAST: Final = 999_999


def as_proposal_id(given: ProposalId | str) -> ProposalId:
    """Return the id of a proposal, parsed if it is text."""
    return given if isinstance(given, ProposalId) else ProposalId.parse(given)


def record_key(proposal_id: ProposalId, number: int) -> str:
    """Return the key of one state of a proposal."""
    return f"{proposal_prefix(proposal_id)}{number:06d}.json"


async def newest_numbers(storage: Storage, prefix: str = PROPOSALS) -> dict[ProposalId, int]:
    """Return the newest record of each proposal, by its number. Cost: one listing."""
    return {name: number for name, (number, _) in (await _newest(storage, prefix)).items()}


async def _newest(storage: Storage, prefix: str) -> dict[ProposalId, tuple[int, int]]:
    """Return the number of the newest record of each proposal, and its size in bytes."""
    found: dict[ProposalId, tuple[int, int]] = {}
    entries = storage.list_prefix(prefix)
    async with closing(entries):
        async for entry in entries:
            if not isinstance(entry, ObjectInfo):
                continue
            known = _KEY.fullmatch(entry.key)
            if known is None:
                continue  # a page, or somebody else's object
            try:
                proposal_id = ProposalId.parse(known["id"])
            except InvalidInputError:
                continue
            # Only ids as this library writes them: the parser also takes `O` for `0`, and two names
            # would be one proposal.
            number = int(known["number"])
            if str(proposal_id) == known["id"] and number >= found.get(proposal_id, (0, 0))[0]:
                found[proposal_id] = number, entry.size_bytes
    return found


async def load(storage: Storage, proposal_id: ProposalId) -> ProposalRecord:
    """Return the present state of a proposal.

    Raises:
        ProposalNotFoundError: there is no such proposal.
        FormatError: its newest record is damaged.

    Cost: one listing and one request.
    """
    newest = await _newest(storage, proposal_prefix(proposal_id))
    if proposal_id not in newest:
        raise _missing(proposal_id)
    return await _read(storage, proposal_id, *newest[proposal_id])


def _missing(proposal_id: ProposalId) -> ProposalNotFoundError:
    return ProposalNotFoundError(
        f"There is no proposal {proposal_id} in this repository. It may have been collected some "
        "time after its end; Repository.proposals lists those that there are.",
        proposal_id=str(proposal_id),
    )


async def _read(
    storage: Storage, proposal_id: ProposalId, number: int, size_bytes: int
) -> ProposalRecord:
    check_size(size_bytes, proposal_id, number)  # before it takes memory
    try:
        data = (await storage.get(record_key(proposal_id, number))).data
    except ObjectNotFoundError as error:  # collected meanwhile
        raise _missing(proposal_id) from error
    return decode_record(data, proposal_id, number)


async def load_all(
    storage: Storage,
) -> tuple[list[ProposalRecord], dict[str, FormatError]]:
    """Return the present state of every proposal, oldest first, and the faults of damaged records.

    Faults are by the key of the record.

    Cost: one listing, and a request for each proposal.
    """
    faults: dict[str, FormatError] = {}

    async def read(entry: tuple[ProposalId, tuple[int, int]]) -> ProposalRecord | None:
        try:
            return await _read(storage, entry[0], *entry[1])
        except ProposalNotFoundError:
            return None
        except FormatError as error:
            faults[record_key(entry[0], entry[1][0])] = error
            return None

    newest = await _newest(storage, PROPOSALS)
    found = await bounded_map(read, newest.items(), limit=_AT_ONCE)
    records = [it for it in found if it is not None]
    return sorted(records, key=lambda it: (it.created_us, it.id)), faults


async def create(storage: Storage, record: ProposalRecord) -> ProposalRecord:
    """Store the first record of a new proposal."""
    record = _stamped(record, 0)
    if await create_object(storage, record_key(record.id, 0), encode_record(record)) is None:
        raise ProposalStateError(
            f"Proposal {record.id} exists already.", proposal_id=str(record.id), state="unknown"
        )
    return record


async def append(
    storage: Storage, previous: ProposalRecord, **changes: Any
) -> ProposalRecord | None:
    """Store the next state of a proposal; return None if another writer was first.

    Raises:
        OutcomeUnknownError: the storage never answered; it may have been stored.
    """
    # A number of seven digits would not be found again, see `_KEY`.
    if previous.number >= _LAST:
        raise ProposalStateError(
            f"Proposal {previous.id} was changed {_LAST} times. Close it and propose again.",
            proposal_id=str(previous.id),
            state=previous.state.value,
        )
    record = _stamped(replace(previous, **changes), previous.number + 1)
    key = record_key(record.id, record.number)
    stored = await create_object(storage, key, encode_record(record))
    return None if stored is None else record


def _stamped(record: ProposalRecord, number: int) -> ProposalRecord:
    return replace(
        record,
        number=number,
        # `create_object` settles a lost reply by comparing bytes, so those of two writers must
        # differ.
        serial=clock.random_bytes(_SERIAL_BYTES).hex(),
        at_us=clock.now_us(),
    )


async def put_page(storage: Storage, proposal_id: ProposalId, page: str) -> None:
    """Store the page of a proposal, in place of an earlier one."""
    # Without a condition: it shows a state of the records, and nothing reads it back.
    await storage.put(f"{proposal_prefix(proposal_id)}{PAGE}", page.encode())


async def pinned(storage: Storage) -> frozenset[SnapshotId]:
    """Return the snapshots that open proposals need: candidates, and what is proposed.

    A damaged proposal needs nothing; it is logged.

    Cost: one listing, and a request for each proposal.
    """
    # Without listings nothing is collected, so nothing has to be kept.
    if not storage.capabilities.listing:
        return frozenset()
    records, faults = await load_all(storage)
    for error in faults.values():
        _log.warning("%s Nothing is kept for it.", error)
    return frozenset(_needed(it for it in records if not it.state.is_over))


def _needed(records: Iterable[ProposalRecord]) -> Iterable[SnapshotId]:
    for it in records:
        yield it.candidate.snapshot_id
        yield it.source_id
