"""``du`` and ``stats``."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tests.unit.cli.conftest import VIRTUAL_BYTES, run

if TYPE_CHECKING:
    from pathlib import Path

    from tests.unit.cli.conftest import Sample

LARGE_BYTES = 2 * 100 * 8


def test_du_tells_what_each_array_takes(sample: Sample) -> None:
    """Sizes are shown by the place of the bytes, with sums at the end."""
    document = run("du", sample.path, "--json").json
    assert [it["path"] for it in document["arrays"]] == ["/deep/large", "/outside", "/small"]
    large, outside, small = document["arrays"]
    assert (large["native_bytes"], large["inline_bytes"], large["chunks"]) == (LARGE_BYTES, 0, 2)
    assert (outside["virtual_bytes"], outside["chunks"]) == (len(VIRTUAL_BYTES), 1)
    assert small["inline_bytes"] > 0
    assert document["native_bytes"] == LARGE_BYTES
    assert document["virtual_bytes"] == len(VIRTUAL_BYTES)
    assert document["inline_bytes"] == small["inline_bytes"]
    assert (document["ref"], document["snapshot_id"]) == ("main", sample.tip)
    lines = run("du", sample.path).stdout.splitlines()
    assert lines[0].split() == ["ARRAY", "CHUNKS", "NATIVE", "VIRTUAL", "INLINE"]
    assert lines[-1].split()[:4] == ["all", "5", "1.6", "kB"]


def test_du_counts_only_what_is_below_a_path_and_in_a_ref(sample: Sample) -> None:
    """A path limits it to what is at or below; a snapshot without arrays takes nothing."""
    below = run("du", sample.path, "v1", "--path", "deep", "--json").json
    assert [it["path"] for it in below["arrays"]] == ["/deep/large"]
    assert run("du", sample.path, sample.first, "--json").json["arrays"] == []
    missing = run("du", sample.path, "--path", "nowhere")
    assert missing.exit_code == 1
    assert "'/nowhere'" in missing.stderr


def test_stats_counts_each_chunk_once(sample: Sample, repository: Path) -> None:
    """However many snapshots and branches use it."""
    document = run("stats", repository, "--json").json
    assert (document["branches"], document["tags"], document["snapshots"]) == (2, 1, 3)
    assert document["native_bytes"] == LARGE_BYTES
    assert document["virtual_bytes"] == len(VIRTUAL_BYTES)
    assert document["spec_version"] == 2
    text = run("stats", repository).stdout
    assert "1.6 kB" in text
