"""Fetch manifests in the background when a session begins, before a reader needs them.

The repository's configuration asks for it (spec, "Configuration"). It is a hint: it delays nothing,
and a manifest that cannot be fetched is read later.
"""

from __future__ import annotations

import logging
from itertools import islice
from typing import TYPE_CHECKING, Final

from icechunk_async._runtime.concurrency import bounded_map
from icechunk_async.errors import FormatError, IcechunkError

if TYPE_CHECKING:
    from icechunk_async.engine.files.assets import Assets
    from icechunk_async.format.config import ManifestPreloadConfig
    from icechunk_async.format.ids import ManifestId
    from icechunk_async.format.snapshot import Snapshot

__all__ = ["choose", "preload"]

_log = logging.getLogger(__name__)
_CONCURRENT_MANIFESTS: Final = 4
"""Few, so that most of the repository's budget of requests is left to its users."""
_MAX_NODES: Final = 10_000
"""Nodes looked at in search of arrays: a huge tree of groups must not hold up the event loop."""
_MAX_STEPS: Final = 1 << 24
"""Steps of all searches with expressions, which take some tenths of a second at most.

A repository may be hostile: many expressions, arrays and manifests multiply.
"""


def choose(base: Snapshot, config: ManifestPreloadConfig, max_refs: int) -> list[ManifestId]:
    """Return the manifests of a snapshot to fetch, in the order of the nodes' paths.

    Args:
        base: the snapshot that a session reads.
        config: which manifests are wanted, and how many references and arrays at most.
        max_refs: another limit of references: what the cache keeps.
    """
    left = min(config.effective_max_total_refs, max_refs)
    condition = config.effective_preload_if
    arrays = islice(base.nodes.first_arrays(_MAX_NODES), config.effective_max_arrays_to_scan)
    chosen: dict[ManifestId, None] = {}
    steps = _MAX_STEPS
    for path in arrays:
        once = condition.most_steps(path)
        steps -= once
        if steps < 0:
            break
        if not condition.may_match(path):  # most are decided without their nodes
            continue
        array = base.nodes[path].array
        for ref in array.manifests if array is not None else ():
            manifest_id = ref.manifest_id
            info = base.manifests.get(manifest_id)
            # One that does not fit is passed over, not the end: smaller ones may follow.
            if info is None or manifest_id in chosen or info.num_chunk_refs > left:
                continue
            steps -= once
            if steps >= 0 and condition.matches(path, info.num_chunk_refs):
                chosen[manifest_id] = None
                left -= info.num_chunk_refs
    return list(chosen)


async def preload(
    base: Snapshot, assets: Assets, config: ManifestPreloadConfig, max_refs: int
) -> None:
    """Fetch the manifests that a configuration selects.

    Cancellation: what was fetched stays.

    Cost: one request for each manifest chosen that is not cached, a few at a time.
    """

    async def load(manifest_id: ManifestId) -> None:
        try:
            await assets.manifests.load(manifest_id, base.manifests[manifest_id].size_bytes)
        except IcechunkError as error:  # a reader that needs the manifest will raise it
            _log.info("manifest %s could not be preloaded: %s", manifest_id, error)

    try:
        chosen = choose(base, config, max_refs)
    except FormatError as error:  # a reader of the damaged node will raise it
        _log.info("no manifest of snapshot %s could be chosen: %s", base.id, error)
        return
    await bounded_map(load, chosen, limit=_CONCURRENT_MANIFESTS)
