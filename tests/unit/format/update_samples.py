"""Entries of the operations log to test with: one of each kind, and any."""

from __future__ import annotations

from hypothesis import strategies as st

from icechunk_async.format.operations_log import (
    Availability,
    BranchCreated,
    BranchDeleted,
    BranchReset,
    CommitAmended,
    ConfigChanged,
    DetachedSnapshotCreated,
    ExpirationRan,
    FeatureFlagChanged,
    GarbageCollectionRan,
    MetadataChanged,
    NewCommit,
    RepoInitialized,
    RepoMigrated,
    RepoStatus,
    RepoStatusChanged,
    TagCreated,
    TagDeleted,
    Update,
    UpdateDetail,
)
from tests.unit.format.samples import SNAPSHOT_IDS, TEXTS, TIMES, snapshot_id

__all__ = ["EVERY_KIND", "STATUSES", "UPDATES"]

EVERY_KIND: dict[int, UpdateDetail] = {
    1: RepoInitialized(),
    2: RepoMigrated(1, 2),
    3: ConfigChanged(),
    4: MetadataChanged(),
    5: TagCreated("tag é"),
    6: TagDeleted("tag", snapshot_id(6)),
    7: BranchCreated("branch"),
    8: BranchDeleted("branch", snapshot_id(8)),
    9: BranchReset("branch", snapshot_id(9)),
    10: NewCommit("main", snapshot_id(10)),
    11: CommitAmended("main", snapshot_id(11), snapshot_id(12)),
    12: DetachedSnapshotCreated(snapshot_id(13)),
    13: GarbageCollectionRan(),
    14: ExpirationRan(),
    15: FeatureFlagChanged(3, new_value=True, is_set=True),
    16: RepoStatusChanged(RepoStatus(Availability.READ_ONLY, 77, "why")),
}
"""By the number of the union's member."""

STATUSES = st.builds(RepoStatus, st.sampled_from(Availability), TIMES, st.none() | TEXTS)
_BYTES = st.integers(0, 255)
_DETAILS: st.SearchStrategy[UpdateDetail] = st.one_of(
    st.sampled_from(list(EVERY_KIND.values())),
    st.builds(RepoMigrated, _BYTES, _BYTES),
    st.builds(TagDeleted, TEXTS, SNAPSHOT_IDS),
    st.builds(BranchReset, TEXTS, SNAPSHOT_IDS),
    st.builds(NewCommit, TEXTS, SNAPSHOT_IDS),
    st.builds(CommitAmended, TEXTS, SNAPSHOT_IDS, SNAPSHOT_IDS),
    st.builds(FeatureFlagChanged, st.integers(0, 65535), st.booleans(), st.booleans()),
    st.builds(RepoStatusChanged, STATUSES),
)
UPDATES = st.builds(Update, _DETAILS, TIMES, st.none() | TEXTS)
"""Any entry; the order of times is up to the engine."""
